"""All-reduces of sparse tensors with damaged indices from another rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.frontend.torch.sparse import all_reduce_sparse


class GroupWithADamagedRank:
    """A group of one rank whose indices arrive as 9."""

    size = 1

    def all_gather(self, outputs: Any, own: torch.Tensor, *, name: str, timeout_s: float) -> None:
        [output] = outputs if isinstance(outputs, list) else [outputs[0]]
        output.copy_(own)
        if name.endswith("indices"):
            output.fill_(9)


class Tensors:
    """Buffers that are the tensors themselves."""

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    read = written


def test_indices_beyond_the_shape_are_an_error_and_the_tensor_is_unchanged() -> None:
    tensor = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    group: Any = GroupWithADamagedRank()
    buffers: Any = Tensors()
    with pytest.raises(shoal.UsageError, match=r"damaged indices.*index 9"):
        all_reduce_sparse(group, tensor, buffers, name="sum", timeout_s=1)
    assert tensor.to_dense().tolist() == [0, 2, 0]
