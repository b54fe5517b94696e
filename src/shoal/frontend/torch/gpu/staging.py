"""Runs calls on device tensors through host memory, on side streams, without blocking the caller.

The caller queues the copies out on a side stream, piece by piece, and returns. A piece is posted
when its copy is done; after its call ends, the copy back is queued on another stream. `wait`
blocks until the last copy back is queued, and orders the current stream behind it.

One thread of each group posts, in the order of the calls, so all ranks post in the same order.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from shoal.errors import Closed, ShoalError, TimedOut, UsageError
from shoal.frontend.torch.gpu.pieces import Piece, owners
from shoal.frontend.torch.work import left_s
from shoal.group.work import follow
from shoal.threads import Threads

if TYPE_CHECKING:
    from shoal.frontend.torch.collectives import Access
    from shoal.frontend.torch.gpu.device import Device, Event
    from shoal.frontend.torch.layouts import Arguments
    from shoal.group.work import Work

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


class DeviceCall:
    """A call on tensors of a device, with the methods of a Work; `doing` begins its messages.

    Attributes:
        last: the event behind all copies to the tensors, after the call's end; None: no copies.
        finished_ns: the time when the call ended, by `time.monotonic_ns`; 0: not yet.
    """

    def __init__(self, device: Device, doing: str) -> None:
        self.doing = doing
        self.last: Event = None
        self.finished_ns = 0
        self._device = device
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Any], None]] = []
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the call, and order the current stream behind its copies.

        Raises TimedOut if this wait was too short (None: only the call's own limit), and the call
        continues; ShoalError if the call failed, with tensors partly folded; RuntimeError if the
        device failed.
        """
        self._wait_until(self.done, timeout_s)
        if self.last is not None:
            self._device.order_current(behind=self.last)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if `wait` would return at once."""
        return self.finished_ns != 0

    def error(self) -> Any:
        """Return the error of a failed call; None if it is running or succeeded."""
        return self._error if self.done() else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """Run `callback(self)` when the call has ended, on the thread that ends it, or here."""
        with self._changed:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)

    def _wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise TimedOut(f"{self.doing}: this wait was too short; the call goes on")

    def _is_over(self) -> list[Callable[[Any], None]]:
        """Mark the call as ended, under the lock; return the callbacks, to run without it."""
        self.finished_ns = time.monotonic_ns()
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


class StagedCall(DeviceCall):
    """One operation through host memory; the constructor queues the copies out.

    Threads: any; `post_copied` by one at a time.

    Args:
        start: the group's call: takes host memory, and returns a Work that runs in the background.
        calls: the buffers of each call, in device memory; `accesses` as for `Piece`.
        copies: pairs of tensors on the device; at the end the second is copied to the first.
    """

    def __init__(
        self,
        device: Device,
        start: Callable[..., Work],
        calls: Sequence[Arguments],
        accesses: Sequence[Access],
        copies: Copies = (),
        doing: str = "a call",
    ) -> None:
        super().__init__(device, doing)
        self._start = start
        self._n_begun = 0
        self._n_ended = 0
        self._copies = list(copies)
        self._tensors = [*owners(calls), *(tensor for tensor, _ in copies)]
        self._pieces = [Piece(device, call, accesses) for call in calls]
        # NOT one stream: copies back would wait for copies out of later pieces. NOT one pair for
        # all calls: each call waits for the work of its caller's stream.
        out, self._back = device.side_pair()
        for tensor in self._tensors:
            device.keep(tensor, out)
        with device.on(out):
            for piece in self._pieces:
                piece.copy_out(device, out)

    # ---- to the wire ----

    def post_copied(self) -> bool:
        """Post the pieces whose copies are done, in order; return True if no piece is left to post.

        Raises RuntimeError if the device has failed.
        """
        while True:
            with self._changed:
                if self._error is not None or self._n_begun == len(self._pieces):
                    return True
                piece = self._pieces[self._n_begun]
                if not self._device.has_passed(piece.copied):
                    return False
                # Counted before the start, so the end waits for it even if another piece fails.
                self._n_begun += 1
            try:
                work = self._start(*piece.arguments)
            except Exception as error:  # noqa: BLE001 - wait() raises it
                with self._changed:
                    self._n_begun -= 1
                self.stop(error.with_traceback(None))  # NOT with its traceback: it holds the memory
                return True
            with self._changed:
                piece.work = work
                self._changed.notify_all()
            # NOT under the lock: a finished work may call back at once.
            follow(work, functools.partial(self._land, piece))

    def stop(self, error: BaseException) -> None:
        """Post nothing more; the call fails with `error` once all posted pieces have ended."""
        with self._changed:
            self._error = self._error or error
        self._end_if_all_have()

    def why_cut_short(self) -> BaseException | None:
        """Return the error that stopped the call after some pieces were posted, or None."""
        with self._changed:
            some = 0 < self._n_begun < len(self._pieces)
            return self._error if some and not isinstance(self._error, UsageError) else None

    # ---- back from the wire ----

    def _land(self, piece: Piece, _work: object = None) -> None:
        """Queue the copies back of a piece, after its call has ended. Idempotent."""
        with self._changed:
            if piece.has_ended or piece.work is None:
                return
            piece.has_ended = True
            error: BaseException | None = piece.work.error()
            if error is None:
                try:
                    with any_tensor(), self._device.on(self._back):
                        piece.copy_back(self._device)
                except Exception as failure:  # noqa: BLE001 - wait() raises it
                    error = failure
            self._error = self._error or error
            piece.let_go()
            self._n_ended += 1
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        with self._changed:
            is_last = self._error is not None or self._n_begun == len(self._pieces)
            if self.done() or not is_last or self._n_ended < self._n_begun:
                return
            try:
                self._give_last_copies()
            except Exception as error:  # noqa: BLE001 - wait() raises it
                self._error = self._error or error
            for piece in self._pieces:
                piece.let_go()
            self._tensors.clear()
            self._copies.clear()
            callbacks = self._is_over()
        for callback in callbacks:
            callback(self)

    def _give_last_copies(self) -> None:
        if self._error is None and self._copies:
            with any_tensor(), self._device.on(self._back):
                for tensor, copy in self._copies:
                    self._device.copy(tensor.detach(), copy)
        for tensor in self._tensors:
            self._device.keep(tensor, self._back)
        # Even after a failure: copies back of earlier pieces may be under way.
        self.last = self._device.record(self._back)

    # ---- the methods of a Work ----

    def wait(self, timeout_s: float | None = None) -> None:
        """Drive the calls until all copies back are queued; see `DeviceCall.wait`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for piece in self._pieces:
            self._wait_until(functools.partial(self._is_posted, piece), left_s(deadline))
            if piece.work is None:
                break
            try:
                piece.work.wait(left_s(deadline))
            except ShoalError:
                if not piece.work.done():
                    raise  # this wait was too short
            self._land(piece)
        super().wait(left_s(deadline))

    @property
    def source(self) -> int | None:
        """The group rank that sent a received message; None for other calls."""
        work = self._pieces[0].work
        return None if work is None else work.source

    def _is_posted(self, piece: Piece) -> bool:
        return piece.work is not None or self.done()


# In inference mode, which is per thread, tensors of both modes can be written.
any_tensor: Final = torch.inference_mode


class Staging:
    """The staged calls of one group, and the thread that posts them; `abort` ends the group."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._changed = threading.Condition()
        self._n_waiting = 0
        self._is_closing = False
        self._thread = Threads("shoal-staging")

    def post(self, call: StagedCall, timeout_s: float) -> None:
        """Post a call behind the earlier calls; Closed after `close`, ShoalError without a thread.

        The group ends if copies out take longer than `timeout_s`; each piece has as long again.
        """
        with self._changed:
            if self._is_closing:
                raise _closed(call)
            deadline = time.monotonic() + timeout_s
            self._thread.submit(lambda: self._post_all_of(call, timeout_s, deadline))
            self._n_waiting += 1

    def flush(self) -> None:
        """Wait until all calls so far are posted or have failed; this includes their copies out."""
        if self._n_waiting:
            with self._changed:
                self._changed.wait_for(lambda: not self._n_waiting)

    def close(self) -> None:
        """Fail unposted calls and end the thread, after the group was closed. Idempotent."""
        with self._changed:
            self._is_closing = True
        self._thread.finish()

    def _post_all_of(self, call: StagedCall, timeout_s: float, deadline: float) -> None:
        try:
            pause_s = SHORTEST_PAUSE_S
            while not call.post_copied():
                time.sleep(pause_s)  # NOT Event.wait: it takes twice the CPU time
                if self._is_closing:
                    call.stop(_closed(call))
                elif time.monotonic() > deadline:
                    raise TimedOut(
                        f"{call.doing}: after {timeout_s:g} s its tensors had not been copied to "
                        "the host; look at what the device is doing"
                    )
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            if (why := call.why_cut_short()) is not None:
                raise why
        except Exception as error:  # noqa: BLE001 - wait() raises it
            # NOT left to the deadline: other ranks would wait until then.
            self._abort(str(error) if isinstance(error, ShoalError) else f"{call.doing}: {error}")
            call.stop(error)
        finally:
            with self._changed:
                self._n_waiting -= 1
                self._changed.notify_all()


def _closed(call: StagedCall) -> Closed:
    return Closed(f"{call.doing}: the group was closed or aborted")


# The thread polls for the end of copies, because CUDA's wait has no deadline. A call may lose the
# longest pause; half that pause would cost 4 % of a core while copies run, instead of 2.5 %.
SHORTEST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 500e-6
