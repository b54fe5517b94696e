"""shoal's DistributedDataParallel: its gradients, options, state and reports.

test_torch_ddp_fuzz.py compares training with that of one process on the inputs of all ranks.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import OneOf, whole, wrap
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group, in_torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.average import NotFinite
from shoal.dtypes import Op


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
        for turn in range(4):
            wrapped.zero_grad(set_to_none=turn % 2 == 0)
            wrapped(2.0 + 4 * dist.get_rank()).backward()
            for part in net.parts:
                assert torch.equal(part.grad, torch.full_like(part, 4.0)), part
                if not as_views and turn == 0:
                    part.grad.share_memory_()
                if not as_views and turn == 1:
                    part.grad.untyped_storage().resize_(0)
        assert net.parts[2].grad.stride() == strided.stride()
        for part in net.parts:  # a program can move or save each alone
            storage = part.grad.untyped_storage()
            assert storage.nbytes() == part.grad.numel() * part.grad.element_size()


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(5, 2, sparse=True)
        self.idle = nn.Embedding(5, 2, sparse=True)
        self.last = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, idle: bool) -> torch.Tensor:
        return self.last(self.used(rows) + (self.idle(rows) if idle else 0))


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


class OnePartOfThree(nn.Module):
    """Each rank of two uses another part; none uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(3) for _ in range(3)])

    def forward(self, value: float) -> torch.Tensor:
        return self.parts[dist.get_rank()].sum() * value


def case_a_static_graph_compares_used_parameters_in_the_first_step_only() -> None:
    for hook in (None, allreduce_hook):
        net = OnePartOfThree()
        wrapped = wrap(net, static_graph=True)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        n_compared = []
        with counting(wrapped.reducer.averaging, n_compared):
            for step in range(3):
                wrapped.zero_grad()
                n_compared.append(0)
                wrapped(step + 1.0).backward()
                for part in net.parts[:2]:
                    assert torch.equal(part.grad, torch.full((3,), (step + 1) / 2))
                assert net.parts[2].grad is None
        assert n_compared == [1, 0, 0]


def case_a_hook_changes_no_gradient_that_no_rank_has() -> None:
    net, kept = OnePartOfThree(), torch.full((3,), 1.001)  # which bf16 would round
    wrapped = wrap(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    net.parts[2].grad = kept.clone()
    wrapped(1.0).backward()
    assert torch.equal(net.parts[0].grad, torch.full((3,), 0.5))
    assert torch.equal(net.parts[2].grad, kept)


class Repeated(nn.Module):
    """One layer, made `n` times, with a gradient for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n = nn.Linear(6, 6), 2

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for _ in range(self.n):
            data = checkpoint(self.layer, data, use_reentrant=True)
        return data


def case_more_gradients_of_a_static_graph_than_at_first_are_an_error() -> None:
    net = Repeated()
    wrapped, given = wrap(net, static_graph=True), torch.ones(1, 6, requires_grad=True)
    for _ in range(2):
        wrapped(given).sum().backward()
    net.n = 3
    with pytest.raises(RuntimeError, match=r"graph has changed.*layer\.(weight|bias).*had 2"):
        wrapped(given).sum().backward()


@contextlib.contextmanager
def counting(averaging: Any, counts: list[int]) -> Iterator[None]:
    """Add the calls that find used parameters to the last of these counts."""
    is_hooked = hasattr(averaging, "_used_anywhere")
    owner, name = averaging, "_used_anywhere"
    if not is_hooked:
        owner, name = averaging.averager.group, "all_reduce"
    own = getattr(owner, name)

    def count(*given: Any, **how: Any) -> Any:
        counts[-1] += is_hooked or given[1] is Op.BOR
        return own(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count)
        yield


def case_ranks_count_by_weight_and_a_non_finite_value_is_named_with_its_rank() -> None:
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


@in_torch("three_ranks")
def test_models_that_differ_are_refused_with_the_difference_and_the_ranks() -> None:
    rank = dist.get_rank()
    linear, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    frozen.register_buffer("seen", torch.zeros(3, 4) if rank == 2 else torch.zeros(4, 3))
    wider = nn.Sequential(linear, nn.Linear(2, 3 if rank == 1 else 4))
    biased, buffered = nn.Linear(2, 2, bias=rank > 0), nn.Sequential(linear, frozen)
    static = {"static_graph": rank == 1}
    for net, options, what, values in (
        (wider, {}, "parameter 1.weight", "float32[4, 2] on ranks 0, 2, "),
        (biased, {}, "parameter bias", "none on rank 0, float32[2] on ranks 1, 2"),
        (buffered, {}, "buffer 1.seen", "float32[4, 3] on ranks 0, 1, float32[3"),
        (linear, static, "static_graph", "False on ranks 0, 2, True on rank 1"),
    ):
        words = f"{what} is not the same on all ranks: {values}"
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

    class OnTwoGpus(shoal.torch.DistributedDataParallel):
        """As torch marks a wrapper of such a model, of which there is none here."""

        is_multi_device_module = property(lambda _: True, lambda *_: None)

    with pytest.raises(shoal.Unsupported, match="parameters on several GPUs"):
        OnTwoGpus(nn.Linear(2, 2))
    mode = torch._dynamo.config.patch(optimize_ddp="python_reducer")
    with mode, pytest.raises(shoal.Unsupported, match="a second time"):
        wrap(nn.Linear(2, 2))


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
    net = wrap(nn.Linear(16, 8))
    net.register_comm_hook(None, allreduce_hook)
    net(torch.ones(4, 16)).sum().backward()
    with pytest.raises(shoal.Unsupported, match=r"communication hooks.*torch\.profiler"):
        net.report()


def case_a_communication_hook_stays_when_the_graph_becomes_static() -> None:
    buckets: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        buckets.append(bucket.index())
        return allreduce_hook(state, bucket)

    net = wrap(nn.Linear(16, 8))
    net.register_comm_hook(None, hook)
    net._set_static_graph()
    for _ in range(2):
        net(torch.ones(4, 16)).sum().backward()
    assert buckets == [0, 0]


@pytest.mark.parametrize("case", cases_in(globals()))
def test_shoals_wrapper(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
