"""The torch front end with a group that only records calls: no processes, no native code."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unit.fakes import FakeGroup

import shoal.frontend.torch as frontend
from shoal.dtypes import DType, Op
from shoal.errors import TimedOut, Unsupported, UsageError
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import ShoalBackend, ShoalProcessGroup, takes_backends
from shoal.frontend.torch.work import FinishedWork


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


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
    with pytest.raises(Unsupported, match=r"in group 'fake' \(rank 1 of 2\) is not supported; .+"):
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
