"""Long gradients of every kind of tensor are copied past the caches."""

from collections.abc import Callable

import pytest
import torch

from shoal.frontend.torch.ddp.gradients import copy_tensors

ODD: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(200, 200),
    "transposed": lambda: torch.randn(200, 200).t(),
    "every second": lambda: torch.randn(200, 400)[:, ::2],
    "expanded": lambda: torch.randn(200, 1).expand(200, 200),
    "conjugate": lambda: torch.randn(200, 200, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(200, 200, dtype=torch.complex64).conj().imag,
    "shifted": lambda: torch.randn(40_007)[7:].view(200, 200),
    "zero": lambda: torch._efficientzerotensor((200, 200)),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_long_copy_is_right_for_every_kind_of_tensor(kind: str) -> None:
    source = ODD[kind]()
    for target in (torch.empty(200, 200, dtype=source.dtype), torch.empty_like(source)):
        version = target._version
        copy_tensors([target], [source])
        assert torch.equal(target, source)
        assert target._version > version  # autograd notices
