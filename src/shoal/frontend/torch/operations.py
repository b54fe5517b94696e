"""torch's operations as calls on a shoal group: a table, and a few longer methods.

torch 2.11 to 2.13 call them on a ProcessGroup, later versions on a Backend, under changed names;
`process_group.py` has both classes. Functions import modules that few programs use, so that groups
form quickly.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
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

from shoal.errors import Unsupported
from shoal.frontend.torch import collectives, layouts
from shoal.frontend.torch.collectives import TorchCollective, fold_of
from shoal.frontend.torch.layouts import Arguments, Tensors, only
from shoal.frontend.torch.tensor_buffers import TensorBuffers, describe, unsupported
from shoal.frontend.torch.work import (
    NO_TIMEOUT,
    FinishedWork,
    InBackground,
    PendingWork,
    profiling,
    recorded,
    register,
    this_thread,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.collectives import Access
    from shoal.frontend.torch.gpu.calls import DeviceCalls
    from shoal.group.buffers import BufferView
    from shoal.group.group import Group

    LayOut = Callable[[TensorBuffers, Any, Any], list[Arguments]]


_N_SPARSE_NAMES: Final = 64  # of sparse all-reduces, which take them in turn


def _await_end(before: InBackground | None) -> None:
    """Wait until an earlier call of the same name has ended.

    Otherwise ranks could make the two in different orders, and add unrelated tensors.
    """
    if before is not None:
        with contextlib.suppress(Exception):  # its own Work raises it
            before.wait()


def _refusing(operation: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises `Unsupported` and names the operation as users know it."""

    def refuse(self: Operations, *_args: Any, **_options: Any) -> NoReturn:
        raise unsupported(describe(self.group, operation), instead)

    return refuse


def _in_place(lay_out: LayOut, collective: TorchCollective) -> Callable[..., dist.Work]:
    """Return the method of an operation on a list of tensors, or one tensor."""

    def call(self: Operations, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        return self._run(collective, lay_out, tensors, None, given, named)

    return call


def _between(lay_out: LayOut, collective: TorchCollective) -> Callable[..., dist.Work]:
    """Return the method of an operation that writes some tensors and reads others."""

    def call(self: Operations, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        return self._run(collective, lay_out, outputs, inputs, given, named)

    return call


class Operations:
    """The operations of one group.

    After the tensors, a method takes torch's options, or the arguments of its overloads: `root`,
    `op` and `timeout`.

    Threads: any, as long as every rank issues the same collectives in the same order.

    Args:
        group: owned: shutdown closes it.
        timeout: the timeout of calls without their own.
        store: torch's store, through which GPUs of one host find each other; None: they do not.

    Attributes:
        group: the shoal group that runs the calls.
    """

    def __init__(self, group: Group, timeout: timedelta, store: Store | None = None) -> None:
        self._store: Any = store
        self._making_devices = threading.Lock()
        # torch compares the calls of a Backend itself, but not of a ProcessGroup in Python.
        self._compares = isinstance(self, ProcessGroup) and get_debug_level() == DebugLevel.DETAIL
        self._registers = True  # False: torch's own code returns the works, and registers them
        self._begin(group, timeout.total_seconds())

    def _begin(self, group: Group, timeout_s: float) -> None:
        """Make all later calls in this group."""
        group.timeout_s = timeout_s
        self.group = group
        self._n_calls = self._n_sparse = 0
        self._sparse: deque[InBackground | None] = deque(maxlen=_N_SPARSE_NAMES)
        self._coalesced: list[PendingWork] | None = None
        self._devices: DeviceCalls | None = None  # created by the first call on device tensors

    # ---- the table: torch's name = (layout of its buffers, collective) ----

    allreduce_coalesced = _in_place(layouts.each_in_place, collectives.ALL_REDUCE)
    reduce = _in_place(layouts.root_in_place, collectives.REDUCE)
    reduce_scatter = _between(layouts.scattered_lists, collectives.REDUCE_SCATTER)
    reduce_scatter_single = reduce_scatter_single_coalesced = _between(
        layouts.scattered_wholes, collectives.REDUCE_SCATTER
    )
    broadcast = _in_place(layouts.one_in_place, collectives.BROADCAST)
    scatter = _between(layouts.scattered_lists, collectives.SCATTER)
    gather = _between(layouts.gathered_lists, collectives.GATHER)
    gather_single = _between(layouts.gathered_whole_at_root, collectives.GATHER)
    allgather = _between(layouts.gathered_lists, collectives.ALL_GATHER)
    allgather_coalesced = _between(layouts.gathered_by_rank, collectives.ALL_GATHER)
    all_gather_single = all_gather_single_coalesced = _between(
        layouts.gathered_wholes, collectives.ALL_GATHER
    )
    alltoall = _between(layouts.exchanged_lists, collectives.ALL_TO_ALL)

    # ---- operations that are more than a row ----

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        """Fold one tensor over all ranks, in place."""
        one = layouts.one_in_place
        try:
            return self._run(collectives.ALL_REDUCE, one, tensors, None, given, named)
        except Unsupported:  # NOT checked before each call: few tensors are sparse
            first = tensors[0] if isinstance(tensors, list) and tensors else tensors
            if not getattr(first, "is_sparse", False):
                raise
        return self.allreduce_sparse(tensors, *given, **named)

    def allreduce_sparse(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        """Sum one COO tensor over all ranks, in place; ranks may have different indices.

        The host waits for the copy of a tensor on a device: it needs the number of entries.
        """
        from shoal.frontend.torch.sparse import all_reduce_sparse, copy_sparse

        opts = _options(dist.AllreduceOptions, given, named)
        buffers = TensorBuffers(self.group, "all_reduce", folds=True)
        tensor = only(buffers, tensors)
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise buffers.error("of sparse tensors takes ReduceOp.SUM only")
        buffers.results.append(tensor)
        host = tensor
        copy_back: Callable[[], Any] | None = None
        if not tensor.is_cpu:
            buffers.note_device(tensor)
            host = tensor.detach().cpu()
            copy_back = functools.partial(copy_sparse, tensor, host)
        self._n_calls += 1
        timeout_s = self._seconds(opts.timeout)
        self._flush()
        if self._compares:
            self._compare("all_reduce", [()], ["of a sparse tensor"], None, timeout_s)
        # Named, so that some ranks may make other calls in between. NOT by `_n_calls`, which
        # differs between ranks once their calls have not agreed.
        self._n_sparse += 1
        name = f"all_reduce_sparse/{self._n_sparse % _N_SPARSE_NAMES}"
        before = self._sparse[0] if len(self._sparse) == _N_SPARSE_NAMES else None
        parts = TensorBuffers(self.group, "all_reduce", folds=True)

        def add_up() -> None:
            _await_end(before)
            all_reduce_sparse(self.group, host, parts, name=name, timeout_s=timeout_s)

        with recorded("sparse_all_reduce"):
            if opts.asyncOp or self._coalesced is not None or copy_back is not None:
                work = InBackground(add_up)
                self._sparse.append(work)
                return self._pending([work], buffers, copy_back=copy_back)
            self._sparse.append(None)
            add_up()
            return FinishedWork([tensor], self._n_calls)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *given: Any,
        **named: Any,
    ) -> dist.Work:
        """Run `alltoall` on the rows of two tensors; without splits ranks get equal numbers."""
        taken, sent = (output, output_splits), (input, input_splits)
        rows = layouts.exchanged_rows
        return self._run(collectives.ALL_TO_ALL, rows, taken, sent, given, named)

    def barrier(self, *given: Any, **named: Any) -> dist.Work:
        """Wait until every rank has called it."""
        return self._run(collectives.BARRIER, layouts.no_tensors, None, None, given, named)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called it; name missing ranks on every rank.

        `timeout` may be None (the group's), or options from torch 2.14 on. The error always names
        all missing ranks, even without `wait_all_ranks`. Raises as monitored_barrier.py does.
        """
        if isinstance(timeout, BarrierOptions):
            timeout = timeout.timeout
        from shoal.frontend.torch.monitored_barrier import monitored_barrier

        monitored_barrier(self.group, self._seconds(timeout or NO_TIMEOUT))

    # ---- messages ----

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send one tensor to a rank of this group, which receives it under the same tag."""
        buffers = TensorBuffers(self.group, "send")
        view = buffers.read(only(buffers, tensors))
        buffers.results.extend(tensors)
        return self._post(self.group.send, view, (dstRank, tag), buffers, collectives.READ)

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive one tensor from a rank of this group."""
        buffers = TensorBuffers(self.group, "recv")
        view = buffers.written(only(buffers, tensors))
        peer = (srcRank, tag)
        return self._post(self.group.recv, view, peer, buffers, collectives.WRITTEN, srcRank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive one tensor of this tag from any rank; the Work's `source_rank` names it."""
        return self.recv(tensors, None, tag)

    # ---- coalescing ----

    def start_coalescing(self, _device: object = None) -> None:
        """Collect all calls from now on in the Work that `end_coalescing` returns."""
        self._coalesced = []

    def end_coalescing(self, _device: object = None) -> dist.Work:
        """Return the Work of all calls since `start_coalescing`."""
        parts, self._coalesced = self._coalesced or [], None

        def copy_back() -> None:
            for part in parts:
                part.copy_back()

        works = [work for part in parts for work in part.works]
        tensors = [each for part in parts for each in part.tensors]
        devices = list(dict.fromkeys(device for part in parts for device in part.devices))
        return PendingWork(works, tensors, copy_back, devices=devices, number=self._n_calls)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # ---- starting ----

    def _run(
        self,
        collective: TorchCollective,
        lay_out: LayOut,
        outputs: Any,
        inputs: Any,
        given: Sequence[Any],
        named: Mapping[str, Any],
    ) -> dist.Work:
        """Check the tensors, lay out the buffers, and start a collective for each tuple of them."""
        opts = _options(collective.options, given, named)
        buffers = TensorBuffers(self.group, collective.name, collective.folds)
        rest: Arguments = ()
        if collective.has_root:
            buffers.root = opts.rootRank
            rest = (buffers.root,)
        if collective.folds:
            fold, buffers.factor = fold_of(opts.reduceOp)
            rest = (*rest, fold)
        if options := this_thread.options:
            wire = options.get("wire")
            buffers.widens = wire is not None and wire.is_narrow
        calls = lay_out(buffers, outputs, inputs)
        if len(calls) > 1 and collective.folds:  # NOT left to the calls: the first would have begun
            for view, *_ in calls:
                self.group.check_fold(collective.name, view.dtype, fold)
        if profiling():
            with recorded(collective.name):
                return self._start(collective, calls, rest, opts, buffers)
        return self._start(collective, calls, rest, opts, buffers)

    def _start(
        self,
        collective: TorchCollective,
        calls: list[Arguments],
        rest: Arguments,
        opts: Any,
        buffers: TensorBuffers,
    ) -> dist.Work:
        """Start the collectives, and finish them if the caller will wait anyway."""
        self._n_calls += len(calls)
        start, how = getattr(self.group, collective.name), this_thread.options
        timeout = opts.timeout
        if timeout > NO_TIMEOUT:
            how = {**how, "timeout_s": timeout.total_seconds()}
        if self._devices is not None and (self._compares or buffers.device is None):
            self._devices.flush()
        if self._compares:
            timeout_s = self._seconds(timeout)
            self._compare(collective.name, calls, rest, collective.alike, timeout_s)
        if buffers.device is not None:
            start = functools.partial(start, **this_thread.options)
            seconds = self._seconds(timeout)
            work = self._on_devices().start(collective, start, calls, rest, buffers, seconds)
            return self._pending([work], buffers)
        if opts.asyncOp or self._coalesced is not None:
            works = [start(*call, *rest, async_op=True, **how) for call in calls]
            return self._pending(works, buffers)
        if len(calls) == 1:
            start(*calls[0], *rest, **how)
        else:
            for work in [start(*call, *rest, work=True, **how) for call in calls]:
                work.wait()
        if buffers.copies:
            buffers.copy_back()
        return FinishedWork(buffers.results, self._n_calls)

    def _post(
        self,
        start: Callable[..., Any],
        view: BufferView,
        peer: tuple[int | None, int],
        buffers: TensorBuffers,
        access: Access,
        source: int | None = -1,
    ) -> dist.Work:
        """Start one message to or from `peer`, a rank and a tag. The caller might not wait."""
        with recorded(start.__name__):
            if buffers.device is not None:
                stage, timeout_s = self._on_devices().stage, self.group.timeout_s
                work: Any = stage(start, [(view,)], peer, (access,), buffers, timeout_s)
            else:
                self._flush()
                work = start(view, *peer, async_op=True)
            return self._pending([work], buffers, source)

    def _pending(
        self,
        works: Sequence[Any],
        buffers: TensorBuffers,
        source: int | None = -1,
        copy_back: Callable[[], object] | None = None,
    ) -> PendingWork:
        """Return the Work of started calls; calls on devices copy back by themselves."""
        devices = (buffers.device,) if buffers.device is not None else ()
        if buffers.copies and not devices:
            copy_back = buffers.copy_back
        results, number = buffers.results, self._n_calls
        work = PendingWork(works, results, copy_back, source, devices, number=number)
        if self._coalesced is not None:
            self._coalesced.append(work)
        else:
            register(work, lists=self._registers)
        return work

    def _on_devices(self) -> DeviceCalls:
        with self._making_devices:  # the import lets other threads run
            if self._devices is None:
                from shoal.frontend.torch.gpu.calls import DeviceCalls

                self._devices = DeviceCalls(self.group, self._store)
            return self._devices

    def _compare(self, *call: Any) -> None:
        """Return when every rank has reached the same collective; see `compare_calls`."""
        from shoal.frontend.torch.compare_calls import compare_calls

        compare_calls(self.group, *call)

    def _flush(self) -> None:
        """Start staged calls first, so that ranks start all calls in the same order."""
        if self._devices is not None:
            self._devices.flush()

    def _seconds(self, timeout: timedelta) -> float:
        """Return the seconds that a call may take; torch passes a negative time for none."""
        return timeout.total_seconds() if timeout > NO_TIMEOUT else self.group.timeout_s

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls without their own."""
        self.group.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self.group.close()
        self._close_devices()

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        self.group.abort("torch.distributed aborted the process group")
        self._close_devices()

    def _close_devices(self) -> None:
        if self._devices is not None:
            self._devices.close()

    # ---- unsupported operations, under the names of all versions of torch ----

    merge_remote_group = mergeRemoteGroup = merge = _refusing(  # noqa: N815 - C++ looks for this
        "merge_group", "start a new default group"
    )
    shrink = _refusing("shrink_group", "use shoal.torch.shrink_group")
    new_window = _refusing("new_window", "use send and recv")

    # ---- properties that torch reads ----

    def getBackendName(self) -> str:  # noqa: N802 - torch looks for this name
        """Return the name under which the backend was registered."""
        return "shoal"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    _supports_time_estimate = False  # its name from torch 2.15 on
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def supports_tensor_alloc(self, device: object) -> bool:
        """Return False: shoal allocates no tensors for torch."""
        return False

    @property
    def options(self) -> Any:
        """The backend's options in torch's form."""
        options: Any = Backend.Options("shoal", timedelta(seconds=self.group.timeout_s))
        options.group_name = self.group.name
        return options

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives started."""
        return self._n_calls


def _options(kind: type, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the options in `given`, or new options from the arguments of torch's overloads."""
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
        elif hasattr(each, "asyncOp"):  # options of a class other than `kind`
            return each
        elif each is not None:
            options.rootRank = each
    return options


_NAMES: Final = {"opts", "root", "op", "timeout"}
_REDUCE_OPS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)
