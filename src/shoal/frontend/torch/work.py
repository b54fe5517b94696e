"""What torch's collectives return: a Work to wait for, or a Future of the list of tensors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # TimeoutError itself from 3.11 on
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from shoal.errors import Closed, ShoalError, TimedOut
from shoal.frontend.torch.compiler import not_compiled
from shoal.threads import Threads

if TYPE_CHECKING:
    from shoal.frontend.torch.gpu.device import Device, TensorsFuture
    from shoal.frontend.torch.gpu.local_calls import LocalCall
    from shoal.frontend.torch.gpu.staging import StagedCall
    from shoal.group.work import Work

_LOG: Final = logging.getLogger("shoal")

NO_TIMEOUT: Final = timedelta(0)

# Whether torch's profiler records this thread: 0.03 us.
profiling: Final[Callable[[], bool]] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


# Whether torch keeps a list of what is under way, for compiled programs to wait for: 0.06 us.
_registering: Final[Callable[[], bool]] = (
    torch._C._distributed_c10d._allow_inflight_collective_as_graph_input
)


def unregister(tensors: Sequence[torch.Tensor]) -> None:
    """Take what has been waited for off torch's list, if it keeps one.

    torch's own backends take off a Work, which only C++ can. This takes off all that was called on
    the tensors, and waits for it.
    """
    if _registering():
        for tensor in tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)


def recorded(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in torch's profiler, if it records; what is left to wait for is another, shoal:wait.

    NOT one range that ends with the call, on whichever thread notices: the profiler may be stopped
    and gone by then.
    """
    if not profiling():
        return _NOT_RECORDED
    return torch.profiler.record_function(_given_name() or f"shoal:{name}")


_NOT_RECORDED: Final = contextlib.nullcontext()

# What dist.record_comm (torch >= 2.13) wants calls to be named; empty if nothing.
_given_name: Final[Callable[[], str]] = getattr(
    torch._C._distributed_c10d, "_get_comm_profiling_name", lambda: ""
)


@not_compiled
class FinishedWork(dist.Work):
    """A call that was over when it returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self.tensors = tensors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once."""
        unregister(self.tensors)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done."""
        looked_for = future_for_lookup(self)
        if looked_for is not None:
            return looked_for
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self.tensors))
        return future

    def is_completed(self) -> bool:
        """Whether the call is over, well or badly."""
        return True

    def is_success(self) -> bool:
        """Whether the call is over and did what it should."""
        return True

    def exception(self) -> ShoalError | None:
        """Why the call failed; None if it did not, or is not over yet."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call wrote, once it is over."""
        self.wait()
        return list(self.tensors)

    def synchronize(self) -> None:
        """Wait: that orders the current stream after the call, where tensors have streams."""
        self.wait()

    def source_rank(self) -> int:
        """The group's rank that sent what was received; -1 for everything but a receive."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()  # what torch.distributed.recv calls


@not_compiled
class PendingWork(FinishedWork):
    """A call that is under way, made of one collective or several.

    Threads: any; the future completes, and its callbacks run, on a thread of their own, or on the
    one that sees the last call end where none can be had.

    Args:
        works: the collectives. They keep the tensors alive while they run.
        tensors: the result, as the future gives it.
        copy_back: brings the results from contiguous copies into the tensors; None if there are
            none. It runs once, before a wait returns and before the future is done.
        source: the rank that a receive names; -1 for everything else.
        devices: whose streams the tensors are used on; none: they are in CPU memory.
    """

    def __init__(
        self,
        works: Sequence[Work | StagedCall | LocalCall | _InBackground],
        tensors: Sequence[torch.Tensor],
        copy_back: Callable[[], None] | None = None,
        source: int | None = -1,
        devices: Sequence[Device] = (),
    ) -> None:
        FinishedWork.__init__(self, tensors)
        self.devices = devices
        self.works = works
        self._source = source
        self._copy_back = copy_back
        self._lock = threading.Lock()
        self._completion: _Completion | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drive the call to its end, complete its future and run the callbacks.

        They run on this thread if they have not begun. If another runs them, it is waited for, but
        not by a thread that runs callbacks itself: two that wait for each other's would never end.

        Args:
            timeout: for the call, in this wait; zero or less takes the call's own.

        Raises:
            ShoalError: the call failed; its tensors are partly folded, unless it is a UsageError.
        """
        if profiling():
            with torch.profiler.record_function("shoal:wait"):
                self._wait(timeout)
        else:
            self._wait(timeout)
        unregister(self.tensors)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The future of the list of tensors, the same one every time.

        If the call fails, or no thread can be had to wait for it, waiting for the future raises
        torch's RuntimeError, which quotes the ShoalError.
        """
        looked_for = future_for_lookup(self)
        if looked_for is not None:
            return looked_for
        with self._lock:
            if self._completion is not None:
                return self._completion.future
            completion = _Completion(len(self.works), self._results, self.devices)
            self._completion = completion
        if _hook.works is not None:
            _hook.works.append(self)
            return completion.future
        if _callbacks.is_last_thread:
            with contextlib.suppress(ShoalError):  # the future says it
                self._wait(NO_TIMEOUT)
        # NOT looked at before the future stands: a wait that ended meanwhile would not complete it.
        if self._all_done():
            completion.finish()
            return completion.future
        try:
            # NOT under the lock: a work that is done may call back at once.
            for work in self.works:
                work.on_done(completion.one_is_done)
        except ShoalError as error:
            completion.finish(error)  # another thread may have the future by now
        return completion.future

    def is_completed(self) -> bool:
        """Whether the call is over, well or badly: the tensors may then be used as after `wait`."""
        if not self._all_done():
            return False
        if self.exception() is None:
            self._results()
        return True

    def is_success(self) -> bool:
        """Whether the call is over and did what it should."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> ShoalError | None:
        """Why the call failed; None if it did not, or is not over yet."""
        return next(filter(None, (work.error() for work in self.works)), None)

    def source_rank(self) -> int:
        """The group's rank that sent what was received; -1 for everything but a receive.

        A receive from any source knows it once it is done.
        """
        if self._source is None:
            source: int | None = cast("Any", self.works[0]).source
            return -1 if source is None else source
        return self._source

    def _wait(self, timeout: timedelta) -> None:
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        try:
            for work in self.works:
                work.wait(timeout_s)
            self.copy_back()
        finally:
            with self._lock:
                completion = self._completion
            if completion is not None and self._all_done():
                completion.finish()

    def _results(self, why_not: ShoalError | None = None) -> list[torch.Tensor]:
        """The tensors, once all calls have ended; or raises why not, or why one failed."""
        if why_not is not None:
            raise why_not
        for work in self.works:
            work.wait()
        self.copy_back()
        return list(self.tensors)

    def _all_done(self) -> bool:
        return all(work.done() for work in self.works)

    def copy_back(self) -> None:
        """Copy the results to where they belong, once the collectives are done. Idempotent."""
        if self._copy_back is None:
            return
        with self._lock:  # a second thread waits here until the results are in place
            if self._copy_back is not None:
                self._copy_back()
                self._copy_back = None


class _Completion:
    """A future, and its end: the first thread that comes completes it and runs the callbacks.

    Args:
        n_calls: how many calls must end before it does.
        results: what the future is to give, or raises what it is to raise, given why the calls are
            not waited for, if so. It runs on streams of its own, as the callbacks do, and orders
            them behind the results.
        devices: those of the results.
    """

    def __init__(
        self,
        n_calls: int,
        results: Callable[[ShoalError | None], list[torch.Tensor]],
        devices: Sequence[Device] = (),
    ) -> None:
        # NOT Future.set_exception: C++ takes the exception for the result. DDP looks for the
        # tensors in it, finds none, uses the first all the same and dies of SIGSEGV. What a
        # callback raises becomes an error that C++ knows.
        self._over: Any = devices[0].future(devices) if devices else torch.futures.Future()
        self.future: TensorsFuture = self._over.then(
            lambda over: results(cast("Any", over.value()))
        )
        self._lock = threading.Lock()
        self._n_running = n_calls
        self._first = threading.Lock()
        self._has_ended = threading.Event()

    def one_is_done(self, _call: object) -> None:
        """Count a call that has ended; after the last one, complete the future."""
        with self._lock:
            self._n_running -= 1
            if self._n_running:
                return
        try:
            _threads_of(os.getpid()).submit(self.finish)
        except ShoalError as error:
            if not isinstance(error, Closed):  # as at the end of every program
                _warn_that_callbacks_take_turns(str(error))
            _callbacks.is_last_thread = True
            try:
                self.finish()
            finally:
                _callbacks.is_last_thread = False

    def finish(self, why_not: ShoalError | None = None) -> None:
        """Complete the future and run its callbacks, unless another thread does; then wait for it.

        The calls have ended, or are not waited for. In a callback, wait only until the future is
        complete.
        """
        if self._first.acquire(blocking=False):
            _callbacks.n_deep += 1
            try:
                self._over.set_result(why_not)
            finally:
                _callbacks.n_deep -= 1
                self._has_ended.set()
        elif not _callbacks.n_deep:
            self._has_ended.wait()
        elif not self.future.done():
            with contextlib.suppress(RuntimeError):  # why the call failed
                self.future.wait()


class _Hook(threading.local):
    """What the calls of this thread are given while a communication hook makes them.

    Attributes:
        works: those whose futures are held back; None outside a hook.
        subject: what the calls are for; 0: nothing that has a name.
    """

    works: list[PendingWork] | None = None
    subject = 0


_hook: Final = _Hook()


@contextlib.contextmanager
def calls_of_hook(subject: int) -> Iterator[list[PendingWork]]:
    """Have ranks compare this subject with the calls of this thread, and hold back their futures.

    A future that this thread asks for meanwhile completes when its Work is waited for. Its
    callbacks then run on the thread that waits, and the calls that they make come in an order that
    is the same on all ranks.

    Returns:
        The works, each to be waited for.
    """
    works: list[PendingWork] = []
    before = _hook.works, _hook.subject
    _hook.works, _hook.subject = works, subject
    try:
        yield works
    finally:
        _hook.works, _hook.subject = before


def current_subject() -> int:
    """What the calls of this thread are for (`shoal.group.subjects`); 0: nothing with a name."""
    return _hook.subject


class _Callbacks(threading.local):
    """What this thread does for futures.

    Attributes:
        n_deep: in how many completions, one inside another, it is.
        is_last_thread: it completes futures itself, because no other thread can be had. So it also
            waits for calls whose futures the callbacks ask for: nobody else would see their end.
    """

    n_deep = 0
    is_last_thread = False


_callbacks: Final = _Callbacks()


@functools.cache
def _threads_of(_process_id: int) -> Threads:
    """The threads on which futures complete and run their callbacks: as many as are blocked.

    NOT one, and not shoal's completion thread: a callback of one future that waits for another, as
    DDP's PowerSGD hook does, would block the thread that is to complete the other.

    Args:
        _process_id: threads do not survive a fork, so a child has its own.
    """
    return Threads("shoal-futures", most=256)


@functools.cache  # once for each reason
def _warn_that_callbacks_take_turns(why: str) -> None:
    _LOG.warning("callbacks of futures run on the thread that sees calls end: %s", why)


@atexit.register
def _finish() -> None:
    """Let the callbacks that run end before the groups are closed."""
    _threads_of(os.getpid()).finish(_LAST_WAIT_S)


_LAST_WAIT_S: Final = 5.0


class _InBackground:
    """Several calls, one after the other, on a thread of their own: looks like a shoal.Work."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._future.result(timeout_s)
        except FutureTimeout as error:
            if self._future.done():
                raise  # the calls' own
            raise TimedOut(f"waited {timeout_s} s for calls on another thread") from error

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> ShoalError | None:
        # Whatever it is: torch only asks for an exception.
        return cast("ShoalError", self._future.exception()) if self._future.done() else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        self._future.add_done_callback(lambda _: callback(self))


def in_background(go: Callable[[], None]) -> _InBackground:
    """Run `go`, whose calls are named, on a thread of its own, and return at once.

    Raises:
        ShoalError: no thread can be had.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            go()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)

    _threads_of(os.getpid()).submit(run)
    return _InBackground(future)


# ---- what torch 2.14 and later hand out in place of a Work written in Python ----

# Their C++ puts such a Work into a PyWorkHolder, which forwards `wait` and `get_future` alone. All
# else it answers as an object that knows nothing: never complete, successful whatever happened, and
# without a source, which `recv` asks for when it has taken the message. In Python it is a plain
# `torch.distributed.Work`, and nothing can be derived from it. So the methods of that class are
# replaced: they ask the Work inside if it is one of shoal's, and are torch's own otherwise.

_NOT_FORWARDED: Final = (
    *("is_completed", "is_success", "exception", "result", "synchronize"),
    *("source_rank", "_source_rank"),
)

# Of the works of torch's own backends every one says what kind it is; a holder does not.
_UNKNOWN: Final = 100

_NO_FUTURE: Final[torch.futures.Future[Any]] = torch.futures.Future()


class _Lookup(threading.local):
    """Collects the Work that this thread looks for in a holder; None while it looks for none."""

    found: list[FinishedWork] | None = None


_lookup: Final = _Lookup()


def future_for_lookup(work: FinishedWork) -> torch.futures.Future[Any] | None:
    """What `get_future` of a Work returns while it is looked for in a holder; else None."""
    if _lookup.found is None:
        return None
    _lookup.found.append(work)
    return _NO_FUTURE


def _held(holder: Any) -> FinishedWork | None:
    """The Work of shoal in a holder; None for every other Work."""
    if holder._get_op_type() != _UNKNOWN:
        return None
    found: list[FinishedWork] = []
    _lookup.found = found
    try:
        holder.get_future()  # forwarded, so the Work inside notices
    except RuntimeError:  # another backend's, without futures
        return None
    finally:
        _lookup.found = None
    return found[0] if found else None


def _forwarding(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any) -> Any:
        work = _held(self)
        return own(self, *args) if work is None else getattr(work, name)(*args)

    return forward


@functools.cache
def patch_work_holders() -> None:
    """From now on, have holders of shoal's works forward everything, in this process."""
    work: Any = dist.Work
    for name in _NOT_FORWARDED:
        setattr(work, name, _forwarding(name, getattr(work, name)))
