"""A gradient that is no average yet has no values, and keeps what is added to it."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.frontend.torch.ddp.pending import PendingGradient
from shoal.group.buffers import span_of


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


@pytest.fixture
def pending(parameter: nn.Parameter) -> PendingGradient:
    parameter.grad = PendingGradient(parameter, "weight")
    return parameter.grad


ONES = torch.ones(2)
ASKED: dict[str, Callable[[Any], Any]] = {
    "a number added": lambda it: it + 1,
    "a tensor added": lambda it: it + ONES,
    "a number added in place": lambda it: it.add_(1),
    "more than the tensor added": lambda it: it.add_(ONES, alpha=2),
    "another shape added": lambda it: it.add_(torch.ones(1)),
    "another type added": lambda it: it.add_(ONES.double()),
    "added to a tensor": lambda it: ONES + it,
    "added to itself": lambda it: it.add_(it),
    "data": lambda it: it.data,
    "other data": lambda it: setattr(it, "data", ONES),
    "an address": lambda it: it.data_ptr(),
    "memory": span_of,
    "an array": lambda it: it.numpy(),
    "a list": lambda it: it.tolist(),
    "truth": lambda it: bool(it[0]),
    "a copy": copy.deepcopy,
    "copied to a tensor": ONES.clone().copy_,
    "a view": lambda it: it.view(-1),
    "a norm": lambda it: torch._foreach_norm([it]),
}


@pytest.mark.parametrize("what", ASKED)
def test_whatever_asks_for_values_is_refused(what: str, pending: PendingGradient) -> None:
    with pytest.raises(UsageError, match=r"parameter weight is no average yet.*synchronize"):
        ASKED[what](pending)
    assert pending.local is None


def test_what_it_is_can_be_asked(pending: PendingGradient) -> None:
    assert (pending.shape, pending.dtype, pending.device.type) == ((2,), torch.float32, "cpu")
    assert not pending.is_sparse
    assert f"{pending} {pending!r}" == "PendingGradient('weight') PendingGradient('weight')"


def test_a_backward_pass_and_a_program_may_add_in_place(
    parameter: nn.Parameter, pending: PendingGradient
) -> None:
    for _ in range(2):
        (3 * parameter).sum().backward()
    pending += ONES
    assert parameter.grad is pending
    assert pending.local is not None
    assert pending.local.tolist() == [7.0, 7.0]


def test_a_pass_that_keeps_its_graph_leaves_the_gradient_before_alone(
    parameter: nn.Parameter, pending: PendingGradient
) -> None:
    pending += ONES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of the cycle that such a pass makes
        parameter.square().sum().backward(create_graph=True)
    held = parameter.grad
    assert isinstance(held, PendingGradient)
    assert held is not pending
    assert held.local is not None
    assert held.local.tolist() == [3.0, 5.0]
    assert pending.local is not None
    assert pending.local.tolist() == [1.0, 1.0]
