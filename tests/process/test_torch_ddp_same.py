"""`check_same`: what ranks should hold alike, and do not, is named on every rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from process.stage import error_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import wrap
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shoal.errors import UsageError

ODD = 1


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
    with torch.no_grad():
        tensor.view(-1)[-1] += 1


Spoil = Callable[[Net, torch.optim.Adam], object]
# By what the error names: what one rank changes.
FAULTS: dict[str, Spoil] = {
    "in step 4 parameter 'last.weight'": lambda net, _adam: add_to(net.last.weight),
    "in step 4 buffer 'mask'": lambda net, _adam: add_to(net.mask),
    "'exp_avg_sq' of optimizer 0, parameter group 0, parameter 'first.bias'": lambda net, adam: (
        add_to(adam.state[net.first.bias]["exp_avg_sq"])
    ),
    "'lr' of optimizer 0, parameter group 0": lambda _net, adam: adam.param_groups[0].update(
        lr=0.5
    ),
}


def train(spoilt: str, hook: bool) -> list[str]:
    """Six steps; one rank is spoilt after the third."""
    torch.manual_seed(0)
    net = Net()
    wrapped = wrap(net, check_same=2, broadcast_buffers=False)
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
        if number == 3 and spoilt and dist.get_rank() == ODD:
            FAULTS[spoilt](net, adam)
    return errors


def source(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * number + dist.get_rank())


@pytest.mark.parametrize(
    ("spoilt", "hook"), [*((fault, False) for fault in FAULTS), (next(iter(FAULTS)), True)]
)
def test_a_value_that_one_rank_has_changed_is_named_on_every_rank(
    spoilt: str, hook: bool, three_ranks: SharedRanks
) -> None:
    for first, second, third, fourth, *_ in three_ranks.run(train, spoilt, hook):
        assert first == second == third == "None"
        assert f"{spoilt} is not the same on all ranks" in fourth
        assert " on ranks 0, 2, " in fourth
        assert " on rank 1;" in fourth


@pytest.mark.parametrize("hook", [False, True])
def test_ranks_that_are_alike_train_on(hook: bool, three_ranks: SharedRanks) -> None:
    assert three_ranks.run(train, "", hook) == [["None"] * 6] * 3


def case_ranks_that_compare_in_other_steps_are_refused_when_they_wrap() -> None:
    for init_sync in (False, True):
        every = 3 if dist.get_rank() == ODD else 0
        with pytest.raises(UsageError, match="check_same"):
            wrap(Net(), check_same=every, init_sync=init_sync)


def case_an_optimizer_is_refused_where_nothing_is_compared() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="wrap the model with check_same=N"):
        wrap(net).check_same(torch.optim.SGD(net.parameters()))


def case_ranks_that_have_run_out_of_inputs_are_not_compared() -> None:
    net = nn.Linear(6, 3)
    wrapped = wrap(net, check_same=1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            net.zero_grad()
            wrapped(torch.ones(4, 6)).sum().backward()
            sgd.step()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_check_same(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(case)
