"""torch's operations as calls on a shoal group: a table, and the few that are more than a row.

torch 2.11 to 2.13 reach them through a ProcessGroup, later ones through a Backend, under names that
changed on the way; `process_group.py` has both classes.

Imports inside functions are of what few programs use: every rank would pay for it while the group
forms.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    BarrierOptions,
    DebugLevel,
    ProcessGroup,
    get_debug_level,
)

from shoal.frontend.torch import collectives, layouts
from shoal.frontend.torch.collectives import TableRow, TorchCollective, fold_of
from shoal.frontend.torch.layouts import Tensors, check_root, only
from shoal.frontend.torch.tensor_buffers import TensorBuffers, describe, unsupported
from shoal.frontend.torch.work import (
    NO_TIMEOUT,
    FinishedWork,
    PendingWork,
    current_subject,
    in_background,
    profiling,
    recorded,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.collectives import Access, LayOut
    from shoal.frontend.torch.gpu.calls import DeviceCalls
    from shoal.frontend.torch.monitored_barrier import MonitoredBarrier
    from shoal.group.group import Group


def _refusing(operation: str, instead: str) -> Callable[..., NoReturn]:
    """The method that raises `Unsupported`, for an operation by the name that users know."""

    def refuse(self: Operations, *_args: Any, **_options: Any) -> NoReturn:
        raise unsupported(describe(self.group, operation), instead)

    return refuse


def _in_place(name: str, lay_out: LayOut, collective: TorchCollective) -> Callable[..., dist.Work]:
    """The method for an operation on a list of tensors, or on one."""
    row = TableRow(name, lay_out, collective)

    def call(self: Operations, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        return self._run(row, tensors, None, given, named)

    return call


def _between(name: str, lay_out: LayOut, collective: TorchCollective) -> Callable[..., dist.Work]:
    """The method for an operation that writes some tensors and reads others."""
    row = TableRow(name, lay_out, collective)

    def call(self: Operations, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        return self._run(row, outputs, inputs, given, named)

    return call


_ALL_REDUCE: Final = TableRow("all_reduce", layouts.one_in_place, collectives.ALL_REDUCE)


class Operations:
    """The operations of one group.

    Behind the tensors, a method takes torch's options or what torch's overloads take instead:
    `root`, `op` and `timeout`.

    Threads: any, as long as every rank issues the same collectives in the same order.

    Args:
        group: owned: shutdown closes it.
        timeout: of every call that does not bring its own.
        store: torch's, for what else the ranks need to find each other; None: there is none.
    """

    def __init__(self, group: Group, timeout: timedelta, store: Store | None = None) -> None:
        self._group = group
        self._store: Any = store
        self._timeout_s = timeout.total_seconds()
        self._n_calls = 0
        self._coalesced: list[PendingWork] | None = None
        self._devices: DeviceCalls | None = None  # made for the first call on tensors of a device
        self._making_devices = threading.Lock()
        # What torch does itself for a Backend, and not for a ProcessGroup in Python.
        self._compares = isinstance(self, ProcessGroup) and get_debug_level() == DebugLevel.DETAIL
        self._monitored_barrier: MonitoredBarrier | None = None

    @property
    def group(self) -> Group:
        """The shoal group underneath."""
        return self._group

    # ---- the table: torch's name = (the user's name, how its buffers lie, the collective) ----

    allreduce_coalesced = _in_place(
        "all_reduce_coalesced", layouts.each_in_place, collectives.ALL_REDUCE
    )
    reduce = _in_place("reduce", layouts.root_in_place, collectives.REDUCE)
    reduce_scatter = _between("reduce_scatter", layouts.scattered_lists, collectives.REDUCE_SCATTER)
    reduce_scatter_single = reduce_scatter_single_coalesced = _between(
        "reduce_scatter", layouts.scattered_wholes, collectives.REDUCE_SCATTER
    )
    broadcast = _in_place("broadcast", layouts.one_in_place, collectives.BROADCAST)
    scatter = _between("scatter", layouts.scattered_lists, collectives.SCATTER)
    gather = _between("gather", layouts.gathered_lists, collectives.GATHER)
    gather_single = _between("gather", layouts.gathered_whole_at_root, collectives.GATHER)
    allgather = _between("all_gather", layouts.gathered_lists, collectives.ALL_GATHER)
    allgather_coalesced = _between(
        "all_gather_coalesced", layouts.gathered_by_rank, collectives.ALL_GATHER
    )
    all_gather_single = all_gather_single_coalesced = _between(
        "all_gather", layouts.gathered_wholes, collectives.ALL_GATHER
    )
    alltoall = _between("all_to_all", layouts.exchanged_lists, collectives.ALL_TO_ALL)
    _alltoall_rows = _between("all_to_all_single", layouts.exchanged_rows, collectives.ALL_TO_ALL)
    _barrier = _between("barrier", layouts.no_tensors, collectives.BARRIER)

    # ---- collectives that are more than a row ----

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        """Fold one tensor over all ranks, in place."""
        first = tensors[0] if isinstance(tensors, list) and tensors else tensors
        if getattr(first, "is_sparse", False):
            return self.allreduce_sparse(tensors, *given, **named)
        return self._run(_ALL_REDUCE, tensors, None, given, named)

    def allreduce_sparse(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        """Sum one COO tensor over all ranks, in place; every rank may have other indices."""
        from shoal.frontend.torch.sparse import all_reduce_sparse, in_host_memory

        opts = _options(dist.AllreduceOptions, given, named)
        buffers = TensorBuffers(self._group, "all_reduce", folds=True)
        tensor = only(buffers, tensors)
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise buffers.error("of sparse tensors takes ReduceOp.SUM only")
        host, copy_back, devices = in_host_memory(tensor, buffers)
        self._n_calls += 1
        timeout_s = self._seconds(opts.timeout)
        self._flush()
        if self._compares:
            self._compare("all_reduce", [], ["of a sparse tensor"], None, timeout_s)
        # Named, so that no other call of this group can come in between on some ranks only.
        name = f"all_reduce_sparse/{self._n_calls % 64}"
        add_up = functools.partial(
            all_reduce_sparse, self._group, host, buffers, name=name, timeout_s=timeout_s
        )
        with recorded("sparse_all_reduce"):
            if opts.asyncOp or self._coalesced is not None or devices:
                works = [in_background(add_up)]
                return self._pending(PendingWork(works, [tensor], copy_back, devices=devices))
            add_up()
            return FinishedWork([tensor])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *given: Any,
        **named: Any,
    ) -> dist.Work:
        """Do `alltoall` with the rows of two tensors; no splits at all share them out evenly."""
        taken, sent = (output, output_splits), (input, input_splits)
        return self._alltoall_rows(taken, sent, *given, **named)

    def barrier(self, *given: Any, **named: Any) -> dist.Work:
        """Wait until every rank has come here."""
        return self._barrier(None, None, *given, **named)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here, and say on every rank which ones did not.

        Args:
            timeout: None takes the group's. Torch 2.14 and later give options.
            wait_all_ranks: makes no difference: all ranks that did not come are named anyway.

        Raises:
            ShoalError: as `MonitoredBarrier.wait`.
        """
        if isinstance(timeout, BarrierOptions):
            timeout = timeout.timeout
        if self._monitored_barrier is None:
            from shoal.frontend.torch.monitored_barrier import MonitoredBarrier

            self._monitored_barrier = MonitoredBarrier(self._group)
        self._monitored_barrier.wait(self._seconds(timeout or NO_TIMEOUT))

    # ---- point to point: torch does not say whether its caller waits at once or at leisure ----

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send one tensor to a rank of this group; that rank receives it under the same tag."""
        buffers = TensorBuffers(self._group, "send")
        view = buffers.read(only(buffers, tensors))
        buffers.results.extend(tensors)
        return self._post(self._group.send, (view, dstRank, tag), buffers, collectives.READ, -1)

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive one tensor from a rank of this group."""
        buffers = TensorBuffers(self._group, "recv")
        view = buffers.written(only(buffers, tensors))
        call = (view, srcRank, tag)
        return self._post(self._group.recv, call, buffers, collectives.WRITTEN, srcRank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive one tensor from whichever rank sends one of this tag; the Work says which."""
        return self.recv(tensors, None, tag)

    # ---- coalescing: the works of what is called in between become one ----

    def start_coalescing(self, _device: object = None) -> None:
        """From now on start every call and leave the waiting to the work of `end_coalescing`."""
        self._coalesced = []

    def end_coalescing(self, _device: object = None) -> dist.Work:
        """The work of all that was called since `start_coalescing`."""
        parts, self._coalesced = self._coalesced or [], None

        def copy_back() -> None:
            for part in parts:
                part.copy_back()

        works = [work for part in parts for work in part.works]
        tensors = [each for part in parts for each in part.tensors]
        devices = list(dict.fromkeys(device for part in parts for device in part.devices))
        return PendingWork(works, tensors, copy_back, devices=devices)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # ---- starting ----

    def _run(
        self,
        row: TableRow,
        outputs: Any,
        inputs: Any,
        given: Sequence[Any],
        named: Mapping[str, Any],
    ) -> dist.Work:
        """Do what the row says: lay out the buffers, and start a collective for each.

        Args:
            given: torch's options, or what its overloads take instead; `named`: the same.
        """
        collective, root, factor = row.collective, None, None
        opts = _options(collective.options, given, named)
        rest: layouts.Arguments = ()
        if collective.has_root:
            root = opts.rootRank
            rest = (root,)
        if collective.folds:
            fold, factor = fold_of(opts.reduceOp)
            rest = (*rest, fold)
        buffers = TensorBuffers(self._group, row.name, root, collective.folds, factor)
        if root is not None:
            check_root(buffers, root)
        calls = row.lay_out(buffers, outputs, inputs)
        if profiling():
            with recorded(collective.name):
                return self._start(collective, calls, rest, opts, buffers)
        return self._start(collective, calls, rest, opts, buffers)

    def _start(
        self,
        collective: TorchCollective,
        calls: list[layouts.Arguments],
        rest: layouts.Arguments,
        opts: Any,
        buffers: TensorBuffers,
    ) -> dist.Work:
        """Start the collectives, and finish them if the caller is going to wait anyway."""
        self._n_calls += len(calls)
        start, timeout_s = getattr(self._group, collective.name), self._seconds(opts.timeout)
        if subject := current_subject():
            start = functools.partial(start, subject=subject)
        if self._compares or buffers.device is None:
            self._flush()
        if self._compares:
            self._compare(collective.name, calls, rest, collective.alike, timeout_s)
        if buffers.device is not None:
            of_group = self._timeout_s
            work = self._on_devices().start(
                collective, start, calls, rest, buffers, timeout_s, of_group
            )
            return self._pending(PendingWork([work], buffers.results, devices=(buffers.device,)))
        if opts.asyncOp or self._coalesced is not None:
            works = [start(*call, *rest, timeout_s=timeout_s, async_op=True) for call in calls]
            return self._pending(PendingWork(works, buffers.results, buffers.copying_back()))
        if len(calls) == 1:
            start(*calls[0], *rest, timeout_s=timeout_s)
        else:
            for work in [start(*call, *rest, timeout_s=timeout_s, work=True) for call in calls]:
                work.wait()
        if buffers.copies:
            buffers.copy_back()
        return FinishedWork(buffers.results)

    def _post(
        self,
        start: Callable[..., Any],
        call: layouts.Arguments,
        buffers: TensorBuffers,
        access: Access,
        source: int | None,
    ) -> dist.Work:
        """Start one message: `call` is its buffer, the peer and the tag."""
        with recorded(start.__name__):
            if buffers.device is not None:
                view, *rest = call
                staged = self._on_devices().stage(
                    start, [(view,)], rest, (access,), buffers, self._timeout_s
                )
                devices = (buffers.device,)
                return self._pending(
                    PendingWork([staged], buffers.results, source=source, devices=devices)
                )
            self._flush()
            work = start(*call, timeout_s=self._timeout_s, async_op=True)
            return self._pending(
                PendingWork([work], buffers.results, buffers.copying_back(), source)
            )

    def _on_devices(self) -> DeviceCalls:
        """The calls of this group on tensors of devices."""
        with self._making_devices:  # the import lets other threads run
            if self._devices is None:
                from shoal.frontend.torch.gpu.calls import DeviceCalls

                self._devices = DeviceCalls(self._group, self._store)
            return self._devices

    def _compare(
        self,
        name: str,
        calls: Sequence[layouts.Arguments],
        rest: Sequence[object],
        alike: int | None,
        timeout_s: float,
    ) -> None:
        """Return when every rank has come to the same collective; arguments as for `in_words`."""
        from shoal.frontend.torch.compare_calls import compare_calls, in_words

        compare_calls(self._group, in_words(name, calls or [()], rest, alike), timeout_s)

    def _flush(self) -> None:
        """Let calls that are staged go first, so that ranks start all calls in the same order."""
        if self._devices is not None:
            self._devices.flush()

    def _pending(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _seconds(self, timeout: timedelta) -> float:
        """How long a call may take; torch's sign for "not given" is a negative time."""
        return timeout.total_seconds() if timeout > NO_TIMEOUT else self._timeout_s

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on, give this much time to every call that does not bring its own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self._group.close()
        self._close_devices()

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        self._group.abort("torch.distributed aborted the process group")
        self._close_devices()

    def _close_devices(self) -> None:
        if self._devices is not None:
            self._devices.close()

    # ---- what shoal cannot do, under the names that torch looks for, of all versions ----

    merge_remote_group = mergeRemoteGroup = merge = _refusing(  # noqa: N815 - C++ looks for this
        "merge_group", "start a new default group"
    )
    shrink = _refusing("shrink_group", "use shoal.torch.shrink_group")
    reconfigure = get_reconfigure_handle = _refusing(
        "reconfigure", "destroy the group and make a new one"
    )
    new_window = _refusing("new_window", "use send and recv")

    # ---- what torch asks a group about itself ----

    def getBackendName(self) -> str:  # noqa: N802 - torch looks for this name
        """The name under which the backend was registered."""
        return "shoal"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    _supports_time_estimate = False  # its name from torch 2.15 on
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def supports_tensor_alloc(self, device: object) -> bool:
        """Whether tensors for this backend can be had from it."""
        return False

    @property
    def options(self) -> Any:
        """The backend's options, as torch keeps them."""
        options: Any = Backend.Options("shoal", timedelta(seconds=self._timeout_s))
        options.group_name = self._group.name
        return options

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were started."""
        return self._n_calls


def _options(kind: type, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The options in `given`, or new ones out of what torch's overloads take instead."""
    if given and isinstance(given[0], kind):
        return given[0]
    if not named.keys() <= _NAMES:
        raise TypeError(f"unknown keywords {sorted(named.keys() - _NAMES)}")
    options: Any = kind()
    for each in (*given, *named.values()):
        if isinstance(each, timedelta):
            options.timeout = each
        elif isinstance(each, _REDUCE_OPS):
            options.reduceOp = each
        elif hasattr(each, "asyncOp"):  # of a class beside `kind`
            return each
        elif each is not None:
            options.rootRank = each
    return options


_NAMES: Final = {"opts", "root", "op", "timeout"}
_REDUCE_OPS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)
