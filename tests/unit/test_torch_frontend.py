"""The torch front end with a group that only records calls, and long copies: no processes."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from unit.fakes import FakeGroup

import shoal.frontend.torch as frontend
from shoal.dtypes import DType, Op
from shoal.errors import TimedOut, Unsupported, UsageError
from shoal.frontend.torch.ddp.gradients import copy_tensors
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import ShoalBackend, ShoalProcessGroup, takes_backends
from shoal.frontend.torch.sparse import all_reduce_sparse
from shoal.frontend.torch.work import FinishedWork, InBackground, PendingWork
from shoal.group.buffers import span_of

SIZE, RANK = 3, FakeGroup.rank


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup(SIZE)


@pytest.fixture
def operations(group: FakeGroup) -> Operations:
    return Operations(group, timedelta(seconds=60))  # type: ignore[arg-type]


def at_once(kind: type) -> Any:
    options = kind()
    options.asyncOp = False
    return options


def test_without_a_default_group_the_error_names_the_function_that_makes_one() -> None:
    with pytest.raises(UsageError, match=r'create it with init_process_group\("shoal"\)'):
        frontend.group_for("sync_state", None)


def test_a_dense_tensor_is_passed_without_a_copy(group: FakeGroup, operations: Operations) -> None:
    tensor = torch.ones(3, 4)
    work = operations.allreduce([tensor], at_once(dist.AllreduceOptions))
    assert type(work) is FinishedWork
    [(name, (span, op), options)] = group.calls
    assert (name, op, options) == ("all_reduce", Op.SUM, {"timeout_s": 60.0})
    assert (span.address, span.n_elems, span.dtype) == (tensor.data_ptr(), 12, DType.FLOAT32)
    assert span.owner is tensor


def test_calls_of_a_batch_start_before_any_wait(group: FakeGroup, operations: Operations) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    operations.allreduce_coalesced(tensors, at_once(dist.AllreduceCoalescedOptions))
    assert [options["work"] for _, _, options in group.calls] == [True, True]
    assert [work.waits for work in group.works] == [[None], [None]]


def test_a_calls_timeout_overrides_the_groups(group: FakeGroup, operations: Operations) -> None:
    operations.barrier(timeout=timedelta(seconds=2.5))
    operations.barrier()
    operations.set_timeout(timedelta(seconds=7))
    operations.barrier()
    operations.send([torch.ones(1)], 0, 0)
    timeouts = [options["timeout_s"] for _, _, options in group.calls]
    assert timeouts == [2.5, 60.0, 7.0, 7.0]
    assert group.timeout_s == 7.0


def test_a_small_all_reduce_calls_few_functions(operations: Operations) -> None:
    entered: list[str] = []

    def note(frame: Any, event: str, _arg: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("shoal."):
            entered.append(frame.f_code.co_name)

    tensors, options = [torch.ones(1)], at_once(dist.AllreduceOptions)
    operations.allreduce(tensors, options)
    sys.setprofile(note)
    try:
        operations.allreduce(tensors, options)
    finally:
        sys.setprofile(None)
    assert len(entered) == 12, entered  # each takes 0.05 us of about 6


def test_polling_writes_the_result_too(group: FakeGroup, operations: Operations) -> None:
    column = torch.zeros(3, 4)[:, 1]
    work = operations.recv([column], 0, 9)
    group.calls[0][1][0].owner.fill_(5.0)
    group.works[0].finish()
    assert work.is_completed()
    assert work.is_success()
    assert column.tolist() == [5.0] * 3
    assert (work.source_rank(), work._source_rank()) == (0, 0)


MISSING = ("merge_remote_group", "mergeRemoteGroup", "merge", "shrink", "new_window")


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_operation_is_refused_with_a_remedy(name: str, operations: Operations) -> None:
    with pytest.raises(Unsupported, match=r"in group 'fake' \(rank 1 of 3\) is not supported; .+"):
        getattr(operations, name)([torch.ones(1)], None, anything=1)


TENSORS, LISTS = [torch.ones(1)], [[torch.ones(1)]]
# As C++ calls them (PyBackend in torch 2.14 and 2.15): everything by position.
CALLED_BY_CPP: list[tuple[str, tuple[Any, ...]]] = [
    ("broadcast allreduce allreduce_sparse allreduce_coalesced reduce", (TENSORS, None)),
    ("allgather allgather_coalesced gather", (LISTS, TENSORS, None)),
    ("scatter reduce_scatter", (TENSORS, LISTS, None)),
    ("all_gather_single reduce_scatter_single", (TENSORS[0], TENSORS[0], None)),
    ("all_gather_single_coalesced reduce_scatter_single_coalesced", (TENSORS, TENSORS, None)),
    ("alltoall", (TENSORS, TENSORS, None)),
    ("all_to_all_single", (TENSORS[0], TENSORS[0], [], [], None)),
    ("send recv", (TENSORS, 0, 0)),
    ("recv_anysource", (TENSORS, 0)),
    ("barrier new_window", (None,)),
    ("monitored_barrier", (None, False)),
    ("shrink", ([], 0, None)),
    ("merge", (None, None, 0, 1)),
    ("set_timeout", (timedelta(1),)),
    ("supports_tensor_alloc", (0,)),
    ("start_coalescing end_coalescing abort shutdown getBackendName", ()),
    ("_set_sequence_number_for_group _get_sequence_number_for_group", ()),
]
CALLED_AFTER: list[tuple[str, tuple[Any, ...]]] = [
    ("split", (None, [], None)),
    # The first two where a GPU is bound.
    ("eager_connect_single_device perform_nocolor_split reconfigure", (None,)),
    ("get_reconfigure_handle get_error", ()),
]
# Further names of torch 2.11 and 2.13.
CALLED_BEFORE: list[tuple[str, tuple[Any, ...]]] = [
    ("_allgather_base _reduce_scatter_base gather_single", (TENSORS[0], TENSORS[0], None)),
    ("alltoall_base", (TENSORS[0], TENSORS[0], [], [], None)),
    ("_start_coalescing _end_coalescing", (torch.device("cpu"),)),
    ("split_group splitGroup", ([0], timedelta(1), None, "name", "description", None)),
    ("merge_remote_group", (None, 1)),
    ("allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced", (TENSORS, TENSORS, None)),
    ("getGroupName getGroupDesc get_group_store", ()),
    ("setGroupName setGroupDesc", ("a text",)),
]
CALLED_OF = ((ShoalBackend, CALLED_AFTER), (ShoalProcessGroup, CALLED_BEFORE))


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (kind, name, arguments)
        for kind, further in CALLED_OF
        for names, arguments in CALLED_BY_CPP + further
        for name in names.split()
    ],
)
def test_methods_that_cpp_calls_are_defined_by_shoal(kind: type, name: str, arguments: Any) -> None:
    method = inspect.getattr_static(kind, name)
    assert inspect.isfunction(method), "written in Python, so that C++ finds an override"
    inspect.signature(method).bind(None, *arguments)


ABILITIES = ["supports_splitting", "supports_coalescing", "supports_time_estimate"]
ABILITIES += ["_supports_time_estimate", "supports_shrinking", "supports_reconfigure"]
ABILITIES.append("supports_window")


def test_a_group_does_not_make_new_groups_itself() -> None:
    """new_group then goes through the creator, as for every other backend."""
    assert not hasattr(ShoalProcessGroup, "new_group")


@pytest.mark.parametrize("kind", [ShoalBackend, ShoalProcessGroup])
def test_properties_that_torch_reads_are_plain_bools(kind: type) -> None:
    # Inherited, they call C++, which reads the attribute again, without end.
    abilities = {name for name in ABILITIES if inspect.getattr_static(kind, name) is True}
    assert all(isinstance(inspect.getattr_static(kind, name), bool) for name in ABILITIES)
    of_backend = {"supports_splitting", "supports_reconfigure"}
    assert abilities == (of_backend if kind is ShoalBackend else set())


def test_a_timeout_set_while_reconfigure_forms_the_group_is_kept() -> None:
    old, begun = SimpleNamespace(name="world", timeout_s=60.0, close=lambda: None), []

    def form(*_given: Any) -> str:
        old.timeout_s = 7.0  # `set_timeout` in another thread
        return "new"

    backend: Any = SimpleNamespace(
        group=old,
        _reconfiguring=SimpleNamespace(form=form),
        _close_devices=lambda: None,
        _begin=lambda *given: begun.append(given),
    )
    ShoalBackend.reconfigure(backend, None)
    assert begun == [("new", 7.0)]


def test_options_are_those_of_torch(operations: Operations) -> None:
    options = operations.options
    assert (options.backend, options._timeout) == ("shoal", timedelta(seconds=60))


def test_the_shape_is_detected_from_torch_itself() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert takes_backends() == (version >= (2, 14))


@contextlib.contextmanager
def default_group(backend: str = "shoal", **options: Any) -> Iterator[Any]:
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_a_new_group_uses_the_links_of_shoals_default_group(level: dist.DebugLevel) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(level)  # with DETAIL torch wraps the group
    try:
        with default_group(timeout=timedelta(seconds=9)):
            made = dist.new_group([0])
            world, part = (frontend.group_for("", each) for each in (None, made))
            assert part.mesh is world.mesh is not None
            assert (world.name, part.name) == ("world", f"world/{made.group_name}")
            assert world.timeout_s == 9
    finally:
        dist.set_debug_level(before)
    with default_group("gloo"):
        made = dist.new_group([0], backend="shoal", timeout=timedelta(seconds=7))
        beside = frontend.group_for("", made)
        assert (beside.name, beside.rank, beside.size) == (made.group_name, 0, 1)
        assert beside.timeout_s == 7


def test_ranks_meet_within_the_timeout_that_torch_was_given() -> None:
    options: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 2}
    with pytest.raises(TimedOut, match=r"could not join within 0\.05 s"):
        dist.init_process_group("shoal", timeout=timedelta(milliseconds=50), **options)


def test_only_options_of_a_shoal_group_are_accepted() -> None:
    other: Any = dist.ProcessGroupGloo._Options()
    with pytest.raises(UsageError, match="leave out pg_options"), default_group(pg_options=other):
        pass
    with default_group() as group:
        dist.new_group([0], pg_options=group._get_backend(torch.device("cpu")).options)


def test_a_wrong_gpu_setting_is_refused_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOCAL_NCCL", "nonsense")
    with pytest.raises(UsageError, match="SHOAL_LOCAL_NCCL='nonsense' is neither yes nor no"):
        dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=2)


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


def test_a_call_that_fails_on_another_thread_is_the_error_of_its_work() -> None:
    fail = Mock(side_effect=UsageError("not these"))
    failing = PendingWork([InBackground(fail)], [torch.ones(2)])
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
