"""`check_same`: what ranks should hold alike, and do not, is named on every rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from process.ranks import run_ranks
from process.stage import error_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import start, wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

ODD = 1
SIZE = 3


class Net(nn.Module):
    """With a buffer that nobody changes, and statistics of each rank's own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x))) * self.mask
        return result


def add_to(tensor: torch.Tensor) -> None:
    tensor.view(-1)[-1] += 1


def no_fault(_net: Net, _adam: torch.optim.Adam) -> None:
    """All is well."""


def a_parameter(net: Net, _adam: torch.optim.Adam) -> None:
    with torch.no_grad():
        add_to(net.last.weight)


def a_buffer(net: Net, _adam: torch.optim.Adam) -> None:
    add_to(net.mask)


def a_state(net: Net, adam: torch.optim.Adam) -> None:
    add_to(adam.state[net.first.bias]["exp_avg_sq"])


def a_rate(_net: Net, adam: torch.optim.Adam) -> None:
    adam.param_groups[0]["lr"] = 0.5


Spoil = Callable[[Net, torch.optim.Adam], None]
FAULTS: dict[str, tuple[Spoil, str]] = {
    "parameter": (a_parameter, "in step 4 parameter 'last.weight' is not the same on all ranks"),
    "buffer": (a_buffer, "in step 4 buffer 'mask' is not the same on all ranks"),
    "state": (
        a_state,
        "'exp_avg_sq' of optimizer 0, parameter group 0, parameter 'first.bias' is not the same",
    ),
    "rate": (a_rate, "'lr' of optimizer 0, parameter group 0 is not the same on all ranks"),
}


def train(spoil: Spoil, hook: bool = False, **options: Any) -> list[str]:
    """Six steps; one rank is spoilt after the third."""
    start()
    torch.manual_seed(0)
    net = Net()
    wrapped = wrap(net, check_same=2, broadcast_buffers=False, **options)
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    wrapped.check_same(adam)
    errors = []
    for number in range(1, 7):
        net.zero_grad()
        loss = wrapped(torch.randn(4, 6, generator=source(number))).pow(2).sum()
        errors.append(str(error_of(loss.backward)))
        adam.step()
        if number == 3 and dist.get_rank() == ODD:
            spoil(net, adam)
    dist.destroy_process_group()
    return errors


def source(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * number + dist.get_rank())


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_has_changed_is_named_on_every_rank(fault: str) -> None:
    spoil, words = FAULTS[fault]
    for first, second, third, fourth, *_ in run_ranks(train, SIZE, spoil):
        assert first == second == third == "None"
        assert words in fourth
        assert " on ranks 0, 2, " in fourth
        assert " on rank 1;" in fourth


@pytest.mark.parametrize("hook", [False, True])
def test_ranks_that_are_alike_train_on(hook: bool) -> None:
    assert run_ranks(train, SIZE, no_fault, hook) == [["None"] * 6] * SIZE


def test_a_parameter_is_named_with_a_communication_hook_too() -> None:
    for errors in run_ranks(train, SIZE, a_parameter, True):
        assert errors[:3] == ["None"] * 3
        assert "in step 4 parameter 'last.weight' is not the same on all ranks" in errors[3]


def wrap_with_other_numbers(init_sync: bool) -> Exception | None:
    start()
    every = 3 if dist.get_rank() == ODD else 0
    error = error_of(wrap, Net(), check_same=every, init_sync=init_sync)
    dist.destroy_process_group()
    return error


@pytest.mark.parametrize("init_sync", [False, True])
def test_ranks_that_compare_in_other_steps_hear_so_when_they_wrap(init_sync: bool) -> None:
    for error in run_ranks(wrap_with_other_numbers, SIZE, init_sync):
        assert type(error).__name__ == "UsageError", error
        assert "check_same" in str(error)


def name_an_optimizer_in_vain() -> Exception | None:
    start()
    net = nn.Linear(2, 2)
    error = error_of(wrap(net).check_same, torch.optim.SGD(net.parameters()))
    dist.destroy_process_group()
    return error


def test_an_optimizer_is_refused_where_nothing_is_compared() -> None:
    for error in run_ranks(name_an_optimizer_in_vain, 2):
        assert "wrap the model with check_same=N" in str(error)


def join_with_uneven_inputs() -> None:
    start()
    net = nn.Linear(6, 3)
    wrapped = wrap(net, check_same=1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            net.zero_grad()
            wrapped(torch.ones(4, 6)).sum().backward()
            sgd.step()
    dist.destroy_process_group()


def test_ranks_that_have_run_out_of_inputs_are_not_compared() -> None:
    run_ranks(join_with_uneven_inputs, 2)
