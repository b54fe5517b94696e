"""All-reduces on hosts with several GPUs: first among the GPUs, then over the wire.

The GPUs of a host reduce-scatter the tensor. Each sums its part over the wire, through host memory,
with the GPUs of the same place on other hosts. Then the GPUs of the host all-gather the parts. All
calls among the GPUs share one stream and one order, `LocalOrder`. A call enters the order when all
GPUs can begin it, so an all-gather that waits for its data never delays a reduce-scatter.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from shoal.dtypes import Op
from shoal.errors import Closed, PeerLost, TimedOut
from shoal.frontend.torch.collectives import UPDATED
from shoal.frontend.torch.gpu.local_order import Turn, is_over
from shoal.frontend.torch.gpu.pieces import bytes_of, cut, range_of
from shoal.frontend.torch.gpu.staging import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    DeviceCall,
    StagedCall,
    Staging,
    any_tensor,
)
from shoal.threads import Threads

if TYPE_CHECKING:
    from shoal.frontend.torch.gpu.device import Device, Event, Stream
    from shoal.frontend.torch.gpu.local_order import LocalOrder
    from shoal.frontend.torch.gpu.nccl import NcclCollectives
    from shoal.frontend.torch.gpu.staging import Copies
    from shoal.group.buffers import BufferView
    from shoal.group.group import Group


# The group detects a lost rank within this time after its rail: both use the same link.
_NEWS_S: Final = 5.0


def part_of(n_elems: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return a rank's ranges of elements: one of equal parts, and on rank 0 the remainder."""
    n_each = n_elems // size
    parts = [(rank * n_each, (rank + 1) * n_each)]
    return [*parts, (size * n_each, n_elems)] if rank == 0 and n_elems % size else parts


class _Stage(IntEnum):
    MADE = 0  # the tensor is being computed
    SCATTER = 1  # the tensor can be reduce-scattered
    WIRE = 2
    GATHER = 3  # the part is back
    GATHERING = 4
    OVER = 5


class LocalCall(DeviceCall):
    """One all-reduce of a whole tensor, with the sum divided by `divisor`. `LocalCalls` runs it.

    `copies` are pairs of tensors on the device; at the end the second is copied to the first.
    Threads: any for the methods of a Work.
    """

    def __init__(
        self,
        device: Device,
        view: BufferView,
        divisor: int,
        copies: Copies,
        doing: str,
        timeout_s: float,
    ) -> None:
        super().__init__(device, doing)
        self.divisor, self.timeout_s = divisor, timeout_s
        self.view, self.copies = view, list(copies)
        self.flat = bytes_of(view).view(view.owner.dtype)  # type: ignore[attr-defined]
        self.stage = _Stage.MADE
        self.number = -1
        self.staged: StagedCall | None = None
        self.deadline = time.monotonic() + timeout_s
        self.event: Event = device.record()  # behind the work that the call waits for now

    def end(self, error: BaseException | None = None) -> None:
        """End the call and release its memory."""
        with self._changed:
            if error is None:
                self.last = self.event
            elif self.staged is not None:  # finished pieces may still be copied back
                self.last = self.staged.last
            self._error, self.stage = error, _Stage.OVER
            self.copies.clear()
            self.staged = None
            del self.flat, self.view
            callbacks = self._is_over()
        for callback in callbacks:
            callback(self)


class LocalCalls:
    """The local calls of one group, and the thread that advances them while there are any.

    Args:
        group: all ranks; ended when a call fails.
        rail: the ranks of this place, one on each host; used only by this object.
        order: the order of calls among the ranks of this host.
        device: this rank's device.
        collectives: the collectives of the host's devices, with this rank's place as rank. Owned.
        abort: ends the group and the groups of the rail and the order, on every rank.
    """

    def __init__(
        self,
        group: Group,
        rail: Group,
        order: LocalOrder,
        device: Device,
        collectives: NcclCollectives,
        abort: Callable[[str], None],
    ) -> None:
        self.device = device
        self._group, self._rail, self._order = group, rail, order
        self._collectives = collectives
        self._abort = abort
        self._lock = threading.Lock()
        self._calls: list[LocalCall] = []
        self._error: BaseException | None = None
        self._is_driven = False
        self._stream: Stream = device.side_stream()
        self._staging = Staging(abort)
        self._thread = Threads("shoal-local")

    def post(self, call: LocalCall) -> None:
        """Start a call behind the earlier calls; raises if one of them failed, or after `close`."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._is_driven:
                self._thread.submit(self._drive)  # first: it raises if no thread can be started
                self._is_driven = True
            call.number = self._order.add(call.timeout_s)
            self._calls.append(call)

    def close(self) -> None:
        """Fail all calls in flight and end the threads, after the group was closed. Idempotent."""
        with self._lock:
            is_busy = bool(self._calls)
            self._error = self._error or Closed("the group was closed or aborted")
        self._rail.close()
        self._order.close()
        if is_busy:
            self._collectives.abort()
        self._thread.finish()
        self._staging.close()
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._collectives.close()

    # ---- the thread ----

    def _drive(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while True:
            moved = self.step()
            with self._lock:
                if not self._calls:
                    self._is_driven = False
                    return
            pause_s = SHORTEST_PAUSE_S if moved else min(pause_s * 2, LONGEST_PAUSE_S)
            time.sleep(pause_s)

    def step(self) -> bool:
        """Advance all calls that can advance now; return True if any did."""
        with self._lock:
            calls, moved = list(self._calls), False
        try:
            if self._error is None:
                moved = self._go_on(calls)
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)
        if self._error is not None:
            for call in calls:
                self._end_failed(call, self._error)
        with self._lock:
            self._calls = [call for call in self._calls if not call.done()]
        return moved

    def _go_on(self, calls: Sequence[LocalCall]) -> bool:
        ended = self._group.ended()
        if ended is not None:
            raise ended
        with self._lock:
            turn = self._order.next()
        if turn is not None:
            call = next(each for each in calls if each.number == turn.call)
            if turn.half:
                self._gather(call)
            else:
                self._scatter(call)
        moved = [self._look(call) for call in calls]
        return turn is not None or any(moved)

    def _look(self, call: LocalCall) -> bool:
        """Advance a call if it can advance without other ranks; return True if it did."""
        if call.stage is _Stage.MADE and self._has_passed(call, "its tensor was not computed"):
            self._report_ready(call, _Stage.SCATTER)
        elif call.stage is _Stage.WIRE and self._is_back(call):
            self._report_ready(call, _Stage.GATHER)
        elif call.stage is _Stage.GATHERING and self._has_passed(
            call, "the GPUs of this host had not all-gathered its parts"
        ):
            call.end()
        else:
            return False
        return True

    def _has_passed(self, call: LocalCall, otherwise: str) -> bool:
        if self.device.has_passed(call.event):
            return True
        if time.monotonic() > call.deadline:
            raise TimedOut(
                f"{call.doing}: after {call.timeout_s:g} s {otherwise}; look at what the device "
                "is doing"
            )
        return False

    def _report_ready(self, call: LocalCall, stage: _Stage) -> None:
        half = int(stage is _Stage.GATHER)
        # The parts of this host use different wires, and return at different times.
        timeout_s = call.timeout_s * (3 if half else 1)
        view = call.view
        what = f"all_reduce of {view.dtype}[{view.n_elems}], the sum divided by {call.divisor}"
        with self._lock:
            self._order.ready(Turn(call.number, half), what, timeout_s)
        call.stage = stage

    def _is_back(self, call: LocalCall) -> bool:
        if call.staged is not None:
            if not is_over(call.staged):
                return False
            call.event, call.staged = call.staged.last, None
            call.deadline = time.monotonic() + call.timeout_s
        return self._has_passed(call, "its part had not been copied back to this GPU")

    # ---- work queued on the GPUs ----

    def _scatter(self, call: LocalCall) -> None:
        device, stream = self.device, self._stream
        device.keep(call.flat, stream)
        with any_tensor():
            self._collectives.reduce_scatter(stream, call.flat)
        call.stage, call.deadline = _Stage.WIRE, time.monotonic() + call.timeout_s
        if self._rail.size == 1:
            call.event = device.record(stream)
            return
        parts = [range_of(call.view, *part) for part in self._parts(call)]
        pieces = [piece for part in parts for piece in cut((part,), 0, 1)]
        start: Any = functools.partial(
            self._rail.all_reduce, op=Op.SUM, timeout_s=call.timeout_s, async_op=True
        )
        with device.on(stream):  # orders its copies out behind the reduce-scatter
            call.staged = StagedCall(device, start, pieces, [UPDATED], doing=call.doing)
        self._staging.post(call.staged, call.timeout_s)

    def _gather(self, call: LocalCall) -> None:
        device, stream = self.device, self._stream
        with any_tensor(), device.on(stream):
            for begin, end in self._parts(call) if call.divisor != 1 else ():
                device.divide(call.flat[begin:end], call.divisor)
            self._collectives.all_gather(stream, call.flat)
            for tensor, copy in call.copies:
                device.keep(tensor, stream)
                device.copy(tensor.detach(), copy)
        call.event = device.record(stream)
        call.stage, call.deadline = _Stage.GATHERING, time.monotonic() + call.timeout_s

    def _parts(self, call: LocalCall) -> list[tuple[int, int]]:
        return part_of(call.view.n_elems, self._collectives.rank, self._collectives.size)

    # ---- failing ----

    def _fail(self, error: BaseException) -> None:
        """End the group on every rank; later calls raise the error."""
        ended = self._group.ended()
        until = time.monotonic() + _NEWS_S
        while ended is None and isinstance(error, PeerLost) and time.monotonic() < until:
            time.sleep(LONGEST_PAUSE_S)  # for the group's error: the rail has other rank numbers
            ended = self._group.ended()
        with self._lock:
            if self._error is not None:
                return
            # NOT with its traceback: the frames hold the memory.
            self._error = error = (ended or error).with_traceback(None)
        # NOT for a lost peer: every rank detects it, and an aborted group would raise Closed.
        if not isinstance(error, PeerLost):
            self._abort(str(error))
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._collectives.abort()

    def _end_failed(self, call: LocalCall, error: BaseException) -> None:
        """End a failed call if it has nothing on the wire any more."""
        if call.staged is not None:
            call.staged.stop(error)
        if not call.done() and (call.staged is None or call.staged.done()):
            call.end(error)
