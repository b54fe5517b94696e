"""`sync_state` gives a new rank the exact state, and all ranks train on equally."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group, in_torch
from process.stage import error_of
from torch import nn
from torch.utils._pytree import tree_flatten

import shoal.torch
from shoal.errors import Closed, ShoalError, UsageError


class Net(nn.Module):
    """A model with parameters and buffers of every kind."""

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        if changes.get("tied", True):
            self.second.weight = self.first.weight
        self.convolution = nn.Conv2d(2, 3, 2)
        if changes.get("channels_last", True):
            self.convolution.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        low = torch.randn(changes.get("n_low", 5))
        self.low = nn.Parameter(low.to(changes.get("low", torch.bfloat16)))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("passing", torch.randn(3), persistent=False)
        self.extra = seed

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        image = self.convolution(data[:, :2, None, None].expand(-1, -1, 2, 2)).flatten(1)
        out = self.norm(self.second(self.first(data)))
        return out.sum() + image.sum() * self.scalar + self.low.float().sum() * self.scalar

    def get_extra_state(self) -> Any:
        return {"seed": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["seed"]


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(list(parameters), lr=0.01, max_iter=3, history_size=4)


def adam_of_two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "lr": torch.tensor(0.01)}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, amsgrad=True, foreach=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


OPTIMIZERS = {"lbfgs": lbfgs, "adam": adam_of_two_groups, "sgd": sgd}


def train(net: Net, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Make steps of plain torch, the same on every rank."""
    for step in steps:
        source = torch.Generator().manual_seed(step)
        data = torch.randn(8, 6, generator=source)

        def closure(data: torch.Tensor = data) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(data)
            loss.backward()
            return loss

        optimizer.step(closure)


def assert_same(one: Any, other: Any) -> None:
    """Compare nested states to the bit, by torch's own functions."""
    (ours, spec), (theirs, other_spec) = tree_flatten(one), tree_flatten(other)
    assert spec == other_spec
    for a, b in zip(ours, theirs, strict=True):
        assert (type(a), getattr(a, "dtype", None)) == (type(b), getattr(b, "dtype", None))
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chunk_bytes", [100, 16 << 20])
@in_torch("three_ranks")
def test_a_new_rank_gets_the_state_and_trains_on_like_the_others(
    name: str, chunk_bytes: int
) -> None:
    from shoal.frontend.torch import sync_state as module

    rank = dist.get_rank()
    # torch's LBFGS cannot view channels_last, and loads state in the first parameter's type.
    changes = {"channels_last": False, "low": torch.float32} if name == "lbfgs" else {}
    alone = Net(1, **changes)
    alone_optimizer = OPTIMIZERS[name](alone.parameters())
    train(alone, alone_optimizer, 0, 1, 2)
    net = copy.deepcopy(alone) if rank < 2 else Net(7, **changes)
    optimizer = OPTIMIZERS[name](net.parameters())
    if rank < 2:
        optimizer.load_state_dict(copy.deepcopy(alone_optimizer.state_dict()))
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        n_bytes = shoal.torch.sync_state(net, optimizer, progress=lambda *step: seen.append(step))
    of_rank_0 = torch.tensor(n_bytes)
    dist.broadcast(of_rank_0, 0)
    assert n_bytes == (0 if rank == 1 else of_rank_0)
    if rank != 1:
        assert seen[-1] == (n_bytes, n_bytes)
        assert sorted(set(seen)) == seen
        steps = [after - before for (before, _), (after, _) in itertools.pairwise(seen)]
        assert max(steps) <= chunk_bytes
    else:
        assert not seen
    assert net.second.weight is net.first.weight
    assert net.extra == 1
    assert torch.equal(net.passing, alone.passing)
    for steps_more in ((), (3, 4)):
        train(net, optimizer, *steps_more)
        train(alone, alone_optimizer, *steps_more)
        assert_same(net.state_dict(), alone.state_dict())
        assert_same(optimizer.state_dict(), alone_optimizer.state_dict())
    assert shoal.torch.sync_state(net, optimizer, from_rank=2) == 0


def case_any_rank_of_any_group_may_send_and_the_model_may_be_wrapped() -> None:
    pair, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        return
    net = Net(rank)
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=pair)
    net.scalar.data.fill_(rank)
    assert shoal.torch.sync_state(wrapped, from_rank=1, group=pair) > 0
    assert net.scalar.item() == 2


def refused(words: str, *given: Any, **how: Any) -> None:
    with pytest.raises(UsageError, match=words):
        shoal.torch.sync_state(*given, **how)


def case_a_different_model_is_refused_by_name_before_data_moves() -> None:
    rank = dist.get_rank()
    longer = r"low is not the same .*bfloat16\[5\] on ranks 0, 1.*bfloat16\[6\] on rank 2"
    for changes, named in (
        ({"tied": False}, r"parameter second.weight|second\.weight is not the same .* rank 2"),
        ({"n_low": 6}, longer),
    ):
        net = Net(rank, **(changes if rank == 2 else {}))
        before = copy.deepcopy(net.state_dict())
        refused(named, net)
        assert_same(net.state_dict(), before)


def case_a_different_optimizer_is_refused_by_name() -> None:
    rank, net = dist.get_rank(), Net()
    optimizer = (sgd if rank == 2 else lbfgs)(net.parameters())
    refused(r"optimizer is not the same .*SGD on rank 2", net, optimizer)
    optimizer = None if rank == 2 else sgd(net.parameters())
    refused(r"optimizer is not the same .*NoneType on rank 2", net, optimizer)
    parameters = list(net.parameters())[:: -1 if rank == 2 else 1]
    refused("parameter group 0 is not the same", net, sgd(parameters))
    refused("from_rank is not the same", net, from_rank=rank)
    refused("from_rank must be 0 to 2, got 3", net, from_rank=3)
    dist.barrier()


class Odd:
    """A value of a class that only the program defines."""


def case_a_state_that_cannot_be_sent_is_refused_on_every_rank() -> None:
    rank, net = dist.get_rank(), nn.Linear(2, 2)
    net.register_buffer("rows", torch.eye(2).to_sparse())
    refused(r"rows is a Tensor float32\[2, 2\], which cannot be sent", net)
    net.rows = torch.zeros(1, 4).expand(3, 4)  # 3 rows in one place
    refused(r"rows is a Tensor float32\[3, 4\], which cannot be sent", net)
    net = nn.Linear(2, 2)
    optimizer = sgd(net.parameters())
    if rank == 0:
        optimizer.param_groups[0]["odd"] = Odd()
    refused(r"cannot be sent is not the same .*'odd'\] is a Odd on", net, optimizer)
    optimizer.param_groups[0]["odd"] = Odd()
    refused(r"'odd'\] is a Odd, which cannot be sent", net, optimizer)
    optimizer.param_groups[0].update(odd=None, lr=np.float64(0.5) if rank == 0 else 0.25)
    shoal.torch.sync_state(net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


def case_a_value_that_changes_in_transit_is_named_on_every_rank() -> None:
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 1)
    nn.init.constant_(net[1].bias, 1 if rank == 2 else 0)

    def change(_done: int, _total: int) -> None:
        if rank == 0:
            net[1].weight.data.fill_(2)

    if rank == 1:
        assert shoal.torch.sync_state(net) == 0
    else:
        named = r"the state of rank 2 differs .*different value is 1\.weight"
        with pytest.raises(ShoalError, match=named):
            shoal.torch.sync_state(net, progress=change)
    dist.barrier()
    assert (shoal.torch.sync_state(net, from_rank=1) > 0) or rank == 1
    assert net[1].weight.eq(1).all()


def case_an_error_on_a_receiving_rank_ends_the_transfer_on_all_ranks() -> None:
    rank, net = dist.get_rank(), Net(dist.get_rank())

    def fail(_done: int, _total: int) -> None:
        raise ValueError("not this time")

    error = error_of(shoal.torch.sync_state, net, progress=fail if rank == 2 else None)
    if rank == 2:
        assert isinstance(error, ValueError)
    else:
        assert isinstance(error, Closed)
        assert "sync_state failed on rank 2: not this time" in str(error)
    dist.barrier()
    shoal.torch.sync_state(net)
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, net.state_dict())
    for state in gathered[1:]:
        assert_same(state, gathered[0])


def case_another_backend_is_refused() -> None:
    with gloo_group() as gloo:
        refused("does not use shoal", nn.Linear(2, 2), group=gloo)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_states(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(case)
