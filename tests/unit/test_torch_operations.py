"""Refusals of the torch front end, calls that it passes to a recording group, and long copies."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unit.fakes import FakeGroup

from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.ddp.gradients import copy_tensors
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.sparse import all_reduce_sparse
from shoal.frontend.torch.work import InBackground, PendingWork
from shoal.group.buffers import span_of

SIZE, RANK = 3, FakeGroup.rank


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup(SIZE)


@pytest.fixture
def operations(group: FakeGroup) -> Operations:
    return Operations(group, timedelta(seconds=60))  # type: ignore[arg-type]


def ones(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(n) for n in lengths]


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank, options.asyncOp = root, False
    return options


ONE, THREE = torch.ones(2), ones(2, 2, 2)
DOUBLES = [each.double() for each in THREE]
WHOLE, SIX, LONG = torch.ones(6), torch.ones(6), torch.ones(12)
FIRST, SECOND = LONG[:6], LONG[6:]
EIGHTHS = torch.zeros(6, dtype=torch.float8_e5m2)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        return torch.quantize_per_tensor(ONE, 0.5, 0, torch.qint8)


GATHER_AT_0, GATHER_HERE = rooted(dist.GatherOptions, 0), rooted(dist.GatherOptions, RANK)
SCATTER_HERE = rooted(dist.ScatterOptions, RANK)
GATHERS, SCATTERS = "all_gather_single_coalesced", "reduce_scatter_single_coalesced"
SWAP, META = "all_to_all_single", {"device": "meta"}
NO_ROOM = "elements to its own rank but has room for 2"
# Calls that are refused: a part of the error, the method and its arguments.
WRONG: list[tuple[Any, ...]] = [
    ("outputs on rank 0, the root, but not on this rank", "gather", [THREE], [ONE], GATHER_AT_0),
    ("takes 3 outputs, one for each rank, not 2", "gather", [THREE[:2]], [ONE], GATHER_HERE),
    ("needs an output on this rank, which is the root", "gather_single", None, ONE, GATHER_HERE),
    ("output has 5 .* must have 3 times 2 el", "gather_single", torch.ones(5), ONE, GATHER_HERE),
    (r"inputs\[1\] has 3 .* must have 2", "scatter", [ONE], [ones(2, 3, 2)], SCATTER_HERE),
    (r"inputs\[1\] has 3 .* must have 2", "reduce_scatter", [ONE], [ones(2, 3, 3)]),
    (r"inputs\[0\] .*float64 .*float32", "scatter", [ONE], [DOUBLES], SCATTER_HERE),
    (r"outputs\[1\] has 3 .* must have 2", "allgather", [ones(2, 3, 3)], [ONE]),
    ("takes 3 inputs", "alltoall", THREE, THREE[:2]),
    ("one dtype, not of torch.float32, torch.int32", "alltoall", THREE, [ONE, ONE.int(), ONE]),
    ("one dtype, not of torch.float32, torch.int32", SWAP, WHOLE, WHOLE.int(), [], []),
    (f"sends 3 {NO_ROOM}", "alltoall", THREE, ones(2, 3, 2)),
    (f"sends 1 {NO_ROOM}", SWAP, WHOLE, SIX, [2, 2, 2], [3, 1, 2]),
    ("split the output's 7 rows evenly among 3 ranks", SWAP, torch.ones(7), WHOLE, [], []),
    (r"input's 6 rows as \[2, 2, 3\], a total of 7", SWAP, WHOLE, SIX, [2, 2, 2], [2, 2, 3]),
    (r"as \[4, -1, 3\]: a count is negative", SWAP, WHOLE, SIX, [4, -1, 3], []),
    ("takes a contiguous input", SWAP, torch.ones(3, 2), torch.ones(2, 3).t(), [], []),
    ("takes 3 output splits, one for each rank, not 1", SWAP, WHOLE, SIX, [6], []),
    ("split the output: it has no dimensions", SWAP, torch.ones(()), torch.ones(()), [], []),
    ("outputs 0 and 2 into the same memory", "allgather", [[WHOLE[:2], ONE, WHOLE[1:3]]], [ONE]),
    ("outputs 0 and 1 into the same memory", "alltoall", [ONE, ONE, THREE[0]], THREE),
    ("outputs 0 and 1 into the same memory", GATHERS, [FIRST, LONG[5:11]], [ONE, ONE]),
    ("outputs 0 and 1 into the same memory", SCATTERS, [ONE, ONE], [FIRST, SECOND]),
    ("outputs 0 and 1 into the same memory", "allreduce_coalesced", [ONE, ONE]),
    ("would write output 0 where it reads input 1", GATHERS, [FIRST, SECOND], [ONE, FIRST[1:3]]),
    ("would write output 0 where it reads input 1", SCATTERS, [FIRST[2:4], ONE], [FIRST, FIRST]),
    ("would write output 1 where it reads input 1", GATHERS, [FIRST, SECOND], [ONE, SECOND[:2]]),
    ("would write output 1 where it reads input 1", SCATTERS, [ONE, SECOND[:2]], [WHOLE, SECOND]),
    ("PREMUL_SUM of torch.int64", "allreduce", [ONE.long()], dist._make_nccl_premul_sum(0.5)),
    ("share memory", "broadcast", [ONE[:1].expand(3)]),
    (r"all_reduce in .*'fake' \(rank 1 of 3\): torch.float8_e5m2", "allreduce", [EIGHTHS]),
    ("sparse tensors takes ReduceOp.SUM only", "allreduce", [ONE.to_sparse()], dist.ReduceOp.MAX),
    ("has no bor of float32", "allreduce_coalesced", [ONE.int(), ONE], dist.ReduceOp.BOR),
    ("takes one tensor per process, not 2", "reduce", [ONE, ONE]),
    ("on meta is not supported; pass tensor.cpu", "alltoall", [torch.empty(2, **META)] * 3, THREE),
    ("on meta is not supported", "allreduce", [torch.empty(2, layout=torch.sparse_coo, **META)]),
    ("torch.qint8 is not supported; send tensor.dequantize", "send", [quantized()], 0),
    ("torch.sparse_coo is not supported; pass tensor.to_dense", "send", [ONE.to_sparse()], 0),
]


class Wrapper(torch.Tensor):
    """A tensor of two elements and no memory, like fake, functional and distributed ones."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, _function: Any, _types: Any, args: Any = (), _kwargs: Any = None
    ) -> Any:
        return args[0]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_MEMORY = [Wrapper, lambda: freed(torch.ones(2)), lambda: freed(torch.ones(9)[7:])]


GIVEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "updated": lambda to, it: to.allreduce([it]),
    "updated and scaled": lambda to, it: to.allreduce([it], op=dist._make_nccl_premul_sum(2.0)),
    "updated beside another": lambda to, it: to.allreduce_coalesced([ONE, it]),
    "read": lambda to, it: to.all_gather_single(WHOLE, it),
    "written": lambda to, it: to.allgather([[*ones(2, 2), it]], [ONE]),
    "sent": lambda to, it: to.send([it], 0),
}


@pytest.mark.parametrize("make", [*WITHOUT_MEMORY, lambda: torch._efficientzerotensor(2)])
@pytest.mark.parametrize("what", GIVEN)
def test_a_tensor_without_memory_is_refused_before_data_moves(
    what: str, make: Callable[[], torch.Tensor], operations: Operations, group: FakeGroup
) -> None:
    with pytest.raises(UsageError, match=r"of shape \(2,\) without its own memory; pass"):
        GIVEN[what](operations, make())
    assert group.calls == []


@pytest.mark.parametrize("make", WITHOUT_MEMORY)
def test_a_group_refuses_a_tensor_without_memory(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UsageError, match=r"of shape \(2,\) has no memory"):
        span_of(make())


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls_are_refused_before_data_moves(
    wrong: tuple[Any, ...], operations: Operations, group: FakeGroup
) -> None:
    message, method, *arguments = wrong
    with pytest.raises(UsageError, match=message) as caught:
        getattr(operations, method)(*arguments)
    assert isinstance(caught.value, Unsupported) == ("is not supported" in str(caught.value))
    assert group.calls == []


def lengths(spans: Any) -> list[int]:
    return [span.n_elems for span in spans]


def test_only_a_root_writes_a_strided_tensor(operations: Operations, group: FakeGroup) -> None:
    for root, expected in ((0, 0.0), (RANK, 3.0)):
        matrix = torch.zeros(2, 3)
        work = operations.reduce([matrix.t()], root)
        group.calls[-1][1][0].owner.fill_(0.5)
        work.wait()
        assert matrix.sum().item() == expected


def test_any_thread_writes_an_inference_tensor(operations: Operations, group: FakeGroup) -> None:
    with torch.inference_mode():
        matrix = torch.zeros(2, 3)
        work = operations.reduce([matrix.t()], RANK)
        group.calls[-1][1][0].owner.fill_(0.5)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work.wait).result()
    assert matrix.sum().item() == 3.0


def test_rows_of_an_unknown_type_travel_as_bytes(operations: Operations, group: FakeGroup) -> None:
    eighths = torch.zeros(6, dtype=torch.float8_e5m2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this type experimental
        pairs = torch.zeros(3, dtype=torch.complex32)
    for tensor, item in ((eighths, 1), (pairs, 4)):
        n = tensor.numel()
        operations.all_to_all_single(tensor.clone(), tensor, [n - 1, 1, 0], [n - 1, 1, 0])
        places, sources = group.calls[-1][1]
        assert lengths(places) == lengths(sources) == [(n - 1) * item, item, 0]
        assert places[0].dtype is DType.UINT8
        assert places[1].address - places[0].address == (n - 1) * item


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="torch 2.13 and later have it")
def test_a_profiler_range_has_the_given_name(operations: Operations) -> None:
    with torch.autograd.profiler.profile() as profile, dist.record_comm("my own"):
        operations.allreduce([ONE])
    names = {event.key for event in profile.key_averages()}
    assert "my own" in names
    assert "shoal:all_reduce" not in names


def test_calls_on_another_thread_form_one_work() -> None:
    tensors = [torch.ones(2)]
    work = PendingWork([InBackground(lambda: None)], tensors)
    assert work.wait()
    assert work.get_future().wait()[0] is tensors[0]

    def fail() -> None:
        raise UsageError("not these")

    failing = PendingWork([InBackground(fail)], tensors)
    with pytest.raises(UsageError, match="not these"):
        failing.wait(timedelta(seconds=5))
    assert failing.is_completed()
    assert not failing.is_success()
    with pytest.raises(RuntimeError, match="UsageError: not these"):
        failing.get_future().wait()


class GroupWithADamagedRank:
    """A group of one rank whose indices arrive as 9."""

    size = 1

    def all_gather(self, outputs: Any, own: torch.Tensor, *, name: str, timeout_s: float) -> None:
        [output] = outputs if isinstance(outputs, list) else [outputs[0]]
        output.copy_(own)
        if name.endswith("indices"):
            output.fill_(9)


def test_indices_beyond_the_shape_are_an_error_and_the_tensor_is_unchanged() -> None:
    tensor = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    buffers = SimpleNamespace(read=lambda tensor: tensor, written=lambda tensor: tensor)
    with pytest.raises(UsageError, match=r"damaged indices.*index 9"):
        all_reduce_sparse(GroupWithADamagedRank(), tensor, buffers, name="sum", timeout_s=1)
    assert tensor.to_dense().tolist() == [0, 2, 0]


# Long gradients of every kind of tensor are copied past the caches.
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
