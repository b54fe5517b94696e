"""shoal's DistributedDataParallel trains like one process on the inputs of all ranks.

All values are chosen so that float64 holds every sum exactly: no bit may differ.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import OneOf, assert_same_bits, inputs, mine, whole, wrap
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group
from torch import nn
from torch.utils.checkpoint import checkpoint

N_STEPS = 4


class Net(nn.Module):
    """Two layers, a third that is used on request, and a bias that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=torch.float64)
        self.second = nn.Linear(10, 10, dtype=torch.float64)
        self.third = nn.Linear(10, 3, dtype=torch.float64)
        self.spare = nn.Linear(10, 3, dtype=torch.float64)
        self.second.bias = self.first.bias
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = whole(tuple(parameter.shape), seed)

    def forward(
        self, data: torch.Tensor, spare: bool = True, reentrant: bool = False
    ) -> torch.Tensor:
        hidden = torch.relu(self.first(data))
        if reentrant:
            hidden = checkpoint(self.second, hidden, use_reentrant=True)
            hidden = checkpoint(self.second, hidden, use_reentrant=True)
        else:
            hidden = self.second(hidden)
        return self.third(hidden) + (self.spare(hidden) if spare else 0)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum() / len(target)


Step = Callable[[nn.Module, int, Callable[[torch.Tensor], torch.Tensor]], None]


def trained(net: nn.Module, step: Step, part: Any, set_to_none: bool = True) -> list[Any]:
    """Return the gradients of every step, and the final parameters."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6, momentum=0.5)
    for number in range(N_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        step(net, number, part)
        gradients = [parameter.grad for parameter in net.parameters()]
        seen.append([g if g is None else g.clone() for g in gradients])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_round_(list(net.parameters()))  # integers again: sums stay exact
    seen.append([parameter.detach().clone() for parameter in net.parameters()])
    return seen


def everything(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# ---- equality with one process ----


def plainly(net: nn.Module, number: int, part: Any) -> None:
    data, target = inputs(number)
    loss_of(net(part(data)), part(target)).backward()


def accumulating(net: nn.Module, number: int, part: Any) -> None:
    for micro in range(3):
        quiet = net.no_sync() if micro < 2 and hasattr(net, "no_sync") else contextlib.nullcontext()
        with quiet:
            plainly(net, 10 * number + micro, part)


def twice_over_one_forward(net: nn.Module, number: int, part: Any) -> None:
    data, target = inputs(number)
    output = net(part(data))
    loss_of(output, part(target)).backward(retain_graph=True)
    loss_of(output, part(target).flip(1)).backward()


def without_spare(net: nn.Module, number: int, part: Any) -> None:
    data, target = inputs(number)
    loss_of(net(part(data), spare=number == 1), part(target)).backward()


def never_spare(net: nn.Module, number: int, part: Any) -> None:
    data, target = inputs(number)
    loss_of(net(part(data), spare=False), part(target)).backward()


def checkpointed(net: nn.Module, number: int, part: Any) -> None:
    data, target = inputs(number)
    loss_of(net(part(data), spare=False, reentrant=True), part(target)).backward()


STEPS: list[tuple[str, Step, dict[str, Any], bool]] = [
    ("plainly", plainly, {}, True),
    ("into gradients that stay", plainly, {}, False),
    ("in one buffer", plainly, {"bucket_cap_mb": None}, True),
    ("accumulating", accumulating, {}, True),
    ("accumulating in place", accumulating, {}, False),
    ("several backward passes", twice_over_one_forward, {}, True),
    ("several, some unused", twice_over_one_forward, {"find_unused_parameters": True}, True),
    ("unused now and then", without_spare, {"find_unused_parameters": True}, True),
    ("unused, gradients stay", without_spare, {"find_unused_parameters": True}, False),
    ("accumulating, unused", accumulating, {"find_unused_parameters": True}, True),
    ("static", plainly, {"static_graph": True}, True),
    ("static, one unused", never_spare, {"static_graph": True}, True),
    ("static, checkpointed twice", checkpointed, {"static_graph": True}, True),
]


def train_in_every_way(is_alone: bool) -> None:
    """Train with a wrapper over all ranks or over each rank alone, and without a wrapper."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = alone[dist.get_rank()] if is_alone else dist.group.WORLD
    for name, step, options, set_to_none in STEPS:
        net = Net()
        expected = trained(copy.deepcopy(net), step, mine if is_alone else everything, set_to_none)
        found = trained(wrap(net, process_group=group, **options), step, mine, set_to_none)
        try:
            assert_same_bits(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_training_has_the_bits_of_one_process_with_all_inputs() -> None:
    with SharedRanks(4) as four:
        four.run(train_in_every_way, False)


def test_a_rank_alone_trains_as_without_the_wrapper(ranks: SharedRanks) -> None:
    ranks.run(train_in_every_way, True)


# ---- kinds of parameters ----


def case_parameters_of_any_type_and_stride_are_averaged() -> None:
    strided = whole((2, 3, 4, 5), 3, torch.float32).to(memory_format=torch.channels_last)
    net = OneOf(
        whole((5,), 1, torch.bfloat16) + 4,
        whole((3, 2), 2, torch.float16) + 4,
        strided + 4,
        whole((), 4) + 4,
        torch.tensor([4.0, 8.0], dtype=torch.complex64),
        torch.tensor([16.0], dtype=torch.complex128),
        torch.zeros(0),
    )
    for as_views in (False, True):
        wrapped = wrap(net, gradient_as_bucket_view=as_views)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(2.0 + 4 * dist.get_rank()).backward()
            for part in net.parts:
                assert torch.equal(part.grad, torch.full_like(part, 4.0)), part
        assert net.parts[2].grad.stride() == strided.stride()
        for part in net.parts:  # a program can move or save each alone
            storage = part.grad.untyped_storage()
            assert storage.nbytes() == part.grad.numel() * part.grad.element_size()


# ---- unused parameters ----


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(5, 2, sparse=True)
        self.idle = nn.Embedding(5, 2, sparse=True)
        self.last = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, idle: bool) -> torch.Tensor:
        found: torch.Tensor = self.last(self.used(rows) + (self.idle(rows) if idle else 0))
        return found


def case_sparse_gradients_are_averaged_and_an_unused_table_has_none() -> None:
    net = Tables()
    wrapped = wrap(net, find_unused_parameters=True)
    rank = dist.get_rank()
    wrapped(torch.tensor([rank]), False).sum().backward()
    assert net.idle.weight.grad is None
    rows = net.used.weight.grad.to_dense()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2:], torch.zeros(3, 2))
    wrapped.zero_grad()
    wrapped(torch.tensor([rank]), rank == 1).sum().backward()
    assert not net.idle.weight.grad.to_dense()[0].any()
    assert torch.equal(net.idle.weight.grad.to_dense()[1], rows[1])


def case_ranks_count_by_weight_and_a_non_finite_value_is_named_with_its_rank() -> None:
    import shoal
    from shoal.average import NotFinite

    rank = dist.get_rank()
    net = OneOf(torch.ones(3, dtype=torch.float64))
    wrapped = wrap(net, weighted=True, check_finite=True)
    for _ in range(2):
        wrapped.zero_grad()
        if rank:  # the last weight before a backward pass counts
            wrapped.weigh(100)
            wrapped(1.0)
        wrapped.weigh(1 + 2 * rank)
        wrapped(4.0 + 4 * rank).backward()
        assert torch.equal(net.parts[0].grad, torch.full((3,), 7.0, dtype=torch.float64))
    for weight in (-1, float("nan")):
        with pytest.raises(shoal.UsageError, match="weight must be a finite number >= 0"):
            wrapped.weigh(weight)
    with pytest.raises(shoal.UsageError, match=r"call model\.weigh\(n\) before it"):
        wrapped(1.0)
    wrapped.weigh(1)
    with pytest.raises(NotFinite, match=r"parts\.0.*rank 1"):
        wrapped(float("inf") if rank else 1.0).backward()
    with pytest.raises(shoal.UsageError, match="weighted=True"):
        wrap(OneOf(torch.ones(3))).weigh(1)


# ---- wrapping ----


def wrap_models_that_cannot_be() -> None:
    import shoal

    rank = dist.get_rank()
    linear, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    frozen.register_buffer("seen", torch.zeros(3, 4) if rank == 2 else torch.zeros(4, 3))
    differing: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "parameter 1.weight is not the same on all ranks: float32[4, 2] on ranks 0, 2, ": (
            nn.Sequential(linear, nn.Linear(2, 3 if rank == 1 else 4)),
            {},
        ),
        "parameter bias is not the same on all ranks: none on rank 0, float32[2] on ranks 1, 2": (
            nn.Linear(2, 2, bias=rank > 0),
            {},
        ),
        "buffer 1.seen is not the same on all ranks: float32[4, 3] on ranks 0, 1, float32[3": (
            nn.Sequential(linear, frozen),
            {},
        ),
        "static_graph is not the same on all ranks: False on ranks 0, 2, True on rank 1": (
            linear,
            {"static_graph": rank == 1},
        ),
    }
    for words, (net, options) in differing.items():
        with pytest.raises(shoal.UsageError, match=re.escape(words)):
            wrap(net, **options)
    wrapped = wrap(linear)
    two_devices = nn.Sequential(linear, nn.Linear(2, 2, device="meta"))
    refused: list[tuple[type[Exception], str, nn.Module, dict[str, Any]]] = [
        (RuntimeError, "any parameter that requires a gradient", frozen, {}),
        (shoal.UsageError, "wrapped already", wrapped, {}),
        (shoal.UsageError, "wrapped already", nn.Sequential(linear, wrapped), {}),
        (shoal.Unsupported, "bucket_cap_mb_list", linear, {"bucket_cap_mb_list": [1, 2]}),
        (TypeError, "bucket_cap", linear, {"bucket_cap": 1}),
        (ValueError, "device.*(cpu.*meta|meta.*cpu)", two_devices, {}),
    ]
    for kind, words, net, options in refused:
        with pytest.raises(kind, match=words):
            wrap(net, **options)
    with gloo_group() as gloo, pytest.raises(shoal.UsageError, match="does not use shoal"):
        wrap(linear, process_group=gloo)


def test_models_that_differ_are_refused_with_the_difference_and_the_ranks(
    three_ranks: SharedRanks,
) -> None:
    three_ranks.run(wrap_models_that_cannot_be)


def case_state_is_rank_0s_and_its_dict_is_torchs() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = wrap(net)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    state = wrapped.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())
    for tensor in (*net.parameters(), *net.buffers()):
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, tensor.detach())
        assert all(torch.equal(other, everywhere[0]) for other in everywhere)
    theirs.load_state_dict(state)
    assert wrapped.module is net
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)


# ---- reports of time ----


def case_a_report_covers_forward_and_backward_passes_and_all_ranks() -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    net = wrap(layers)
    for step in range(6):
        if step % 2:  # its gradients are accumulated, not averaged
            with net.no_sync():
                net(torch.ones(4, 16)).sum().backward()
        net(torch.ones(4, 16)).sum().backward()
    report = net.report()
    assert [step.number for step in report.steps] == [0, 1, 2, 3, 4]
    for times in report.times:
        assert 0 < times.forward < times.begin < times.backward < times.first < times.wait
        assert times.wait <= times.sent < times.end
    for step in report.steps:
        assert step.forward > 0
        assert step.backward > 0
        assert step.total == pytest.approx(step.forward + step.backward + step.exposed + step.other)
    assert len(report.ranks) == 2
    logged = net._get_ddp_logging_data()
    assert (logged["iteration"], logged["world_size"]) == (6, 2)
    if dist.get_rank() == 0:  # alone
        assert [one.rank for one in net.report(alone=True).ranks] == [0]


def case_a_report_of_a_communication_hook_is_refused() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import shoal

    net = wrap(nn.Linear(16, 8))
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    net(torch.ones(4, 16)).sum().backward()
    with pytest.raises(shoal.Unsupported, match=r"communication hooks.*torch\.profiler"):
        net.report()


def case_a_communication_hook_stays_when_the_graph_becomes_static() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    buckets: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        buckets.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    net = wrap(nn.Linear(16, 8))
    net.register_comm_hook(None, hook)
    net._set_static_graph()
    for _ in range(2):
        net(torch.ones(4, 16)).sum().backward()
    assert buckets == [0, 0]


@pytest.mark.parametrize("case", cases_in(globals()))
def test_shoals_wrapper(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
