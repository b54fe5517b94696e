"""Which parameters a forward pass uses before their module is called."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch import nn

from shoal.frontend.torch.ddp.first_uses import FirstUses


def test_what_is_used_before_its_module_is_called_is_early() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    named = [*layer.parameters(), *other.parameters()]
    called: set[int] = set()
    uses = FirstUses({id(parameter): index for index, parameter in enumerate(named)}, called)
    with uses:
        called.update((0, 1))
        found = layer(torch.ones(1, 2))
        torch.cat([found, other.weight])
    assert uses.early == {2}


def test_what_tells_nothing_of_values_is_no_use() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    uses = FirstUses({id(weight): 0}, set())
    with uses:
        assert (weight.shape, weight.dtype, weight.dim()) == ((2, 2), torch.float32, 2)
        assert weight.requires_grad
    assert not uses.early
    with uses:
        weight.data  # noqa: B018 - a view
    assert uses.early == {0}
