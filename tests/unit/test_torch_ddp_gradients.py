"""Gradients and the places where they are averaged: what the program owns stays the program's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NoReturn

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from shoal.errors import UsageError
from shoal.frontend.torch.ddp.gradients import Gradients, copy_tensors


def refuse(why: str) -> NoReturn:
    raise UsageError(why)


def gradients_in(memory: torch.Tensor, *, as_views: bool) -> Gradients:
    """Two gradients of two elements each, 1 and 2, averaged in this memory of four."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    gradients = Gradients(parameters, ["a", "b"], refuse, as_views=as_views)
    places = [memory[:2], memory[2:]]
    gradients.settle(
        places,
        lambda index: torch.frombuffer(memory.numpy(), dtype=torch.float32)[
            2 * index : 2 * index + 2
        ],
    )
    for value, parameter in enumerate(parameters, 1):
        parameter.grad = torch.full((2,), float(value))
    return gradients


@pytest.mark.parametrize("as_views", [False, True])
def test_a_gradient_is_brought_once_in_a_step(as_views: bool) -> None:
    memory = torch.zeros(4)
    gradients = gradients_in(memory, as_views=as_views)
    gradients.begin()
    gradients.bring([0, 1])
    memory.fill_(7)  # both are on their way
    gradients.bring([1])
    assert memory.tolist() == [7, 7, 7, 7]
    gradients.deliver([0, 1])
    assert [p.grad.tolist() for p in gradients.parameters if p.grad is not None] == [[7, 7], [7, 7]]


def test_a_gradient_with_memory_of_its_own_stays_that_tensor() -> None:
    gradients = gradients_in(torch.zeros(4), as_views=False)
    kept = [parameter.grad for parameter in gradients.parameters]
    gradients.begin()
    gradients.bring([0, 1])
    gradients.deliver([0, 1])
    assert all(p.grad is one for p, one in zip(gradients.parameters, kept, strict=True))


def test_a_view_that_the_program_has_pointed_elsewhere_is_brought_again() -> None:
    memory = torch.zeros(4)
    gradients = gradients_in(memory, as_views=True)
    gradients.begin()
    gradients.bring([0, 1])
    gradients.deliver([0, 1])
    first, second = (parameter.grad for parameter in gradients.parameters)
    assert first is not None
    assert second is not None
    first.data = torch.tensor([3.0, 4.0])
    second.share_memory_()  # moves its storage
    second.fill_(5.0)
    gradients.begin()
    gradients.bring([0, 1])
    assert memory.tolist() == [3, 4, 5, 5]


def test_gradients_that_lie_in_places_that_change_keep_their_values() -> None:
    memory = torch.zeros(4)
    gradients = gradients_in(memory, as_views=True)
    gradients.begin()
    gradients.bring([0, 1])
    gradients.leave([0, 1])
    memory.zero_()
    assert [p.grad.tolist() for p in gradients.parameters if p.grad is not None] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("as_views", [False, True])
def test_hidden_gradients_count_as_zero_and_keep_their_values(as_views: bool) -> None:
    memory = torch.zeros(4)
    gradients = gradients_in(memory, as_views=as_views)
    gradients.begin()
    gradients.bring([0])
    gradients.deliver([0])
    with gradients.hidden():
        gradients.begin()
        gradients.bring([0, 1])
        assert memory.tolist() == [0, 0, 0, 0]
        memory.fill_(9)
        gradients.deliver([0, 1])
    assert [p.grad.tolist() for p in gradients.parameters if p.grad is not None] == [[1, 1], [2, 2]]


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
def test_a_long_copy_is_a_copy_whatever_is_copied(kind: str) -> None:
    source = ODD[kind]()
    for target in (torch.empty(200, 200, dtype=source.dtype), torch.empty_like(source)):
        version = target._version
        copy_tensors([target], [source])
        assert torch.equal(target, source)
        assert target._version > version  # autograd notices
