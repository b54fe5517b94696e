"""The results of torch's collectives: a Work to wait for, or a Future of the list of tensors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

NO_TIMEOUT: Final = timedelta(0)

# True while torch's profiler records this thread: 0.03 us.
profiling: Final[Callable[[], bool]] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# True while torch lists the works in flight, for compiled programs to wait for: 0.06 us.
_registering: Final[Callable[[], bool]] = (
    torch._C._distributed_c10d._allow_inflight_collective_as_graph_input
)


# Works in torch's list, each with the ids of the storages of its tensors.
_listed: Final[dict[FinishedWork, set[int]]] = {}


def _storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the id of each tensor's storage; 0 for a tensor without one, which is not listed."""
    has_storage: Any = torch._C._has_storage
    return [one.untyped_storage()._cdata if has_storage(one) else 0 for one in tensors]


def _drop_settled() -> None:
    for work in [*_listed]:
        if work.is_settled():
            _listed.pop(work, None)


def unregister(work: FinishedWork) -> None:
    """Remove a Work that was waited for from torch's list.

    Only C++ can remove a single Work, as torch's own backends do; `wait_tensor` removes all works
    on a storage, and waits for them. So a Work stays in the list while another on its storage runs,
    whose own wait removes both.
    """
    _listed.pop(work, None)
    _drop_settled()
    running: set[int] = set().union(*_listed.values())
    for tensor, storage in zip(work.tensors, _storages(work.tensors), strict=True):
        if storage not in running:
            torch.ops._c10d_functional.wait_tensor(tensor)


def register(work: PendingWork, *, lists: bool) -> None:
    """Add a Work to torch's list, if it keeps one, for the operations that wait for a tensor.

    `lists`: False if one of torch's own groups, which list works, returns this one.
    """
    if not _registering() or not work.tensors:
        return
    _drop_settled()  # those that only torch's wait_tensor waits for
    _listed[work] = set(_storages(work.tensors))
    if lists:
        # NOT the Work itself: torch would keep only its C++ half alive.
        c10d: Any = torch._C._distributed_c10d
        listed = c10d._create_work_from_future(work.get_future())
        for tensor in work.tensors:
            c10d._register_work(tensor, listed)


def recorded(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range in torch's profiler for the start of a call; its wait has its own, shoal:wait.

    NOT one range until the call ends: by then the profiler may be gone.
    """
    if not profiling():
        return _NOT_RECORDED
    return torch.profiler.record_function(_given_name() or f"shoal:{name}")


_NOT_RECORDED: Final = contextlib.nullcontext()

# The name for calls inside dist.record_comm (torch >= 2.13); "" outside.
_given_name: Final[Callable[[], str]] = getattr(
    torch._C._distributed_c10d, "_get_comm_profiling_name", lambda: ""
)


@not_compiled
class FinishedWork(dist.Work):
    """A call that ended before it returned, with its result and sequence number."""

    __slots__ = ("_number", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], number: int = 0) -> None:
        dist.Work.__init__(self)
        self.tensors = tensors
        self._number = number

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once."""
        if _registering():
            unregister(self)
        return True

    def is_settled(self) -> bool:
        """Return True once torch no longer waits for this Work or its future."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done."""
        if (looked_for := _future_for_lookup(self)) is not None:
            return looked_for
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self.tensors))
        return future

    def is_completed(self) -> bool:
        """Return True if the call has ended, even if it failed."""
        return True

    def is_success(self) -> bool:
        """Return True if the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> ShoalError | None:
        """Return the error of a failed call; None if it is running or succeeded."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that the call wrote."""
        self.wait()
        return list(self.tensors)

    def synchronize(self) -> None:
        """Wait, and order the current stream behind the call."""
        self.wait()

    def source_rank(self) -> int:
        """Return the group rank that sent a received message; -1 for other calls."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()  # torch.distributed.recv calls this name

    def _get_sequence_number(self) -> int:
        return self._number  # torch's name


@not_compiled
class PendingWork(FinishedWork):
    """A call in flight, made of one collective or several. Threads: any.

    Args:
        works: the collectives. They keep the tensors alive while they run.
        tensors: the result, which is also the future's value.
        copy_back: copies results from contiguous memory into the tensors, once, before a wait
            returns and before the future is done; None: nothing to copy.
        source: the source rank of a receive, None for any; -1 for other calls.
        devices: the tensors' devices, without the CPU.
        number: the group's sequence number of the last of the collectives.
    """

    __slots__ = ("_completion", "_copy_back", "_lock", "_source", "devices", "works")

    def __init__(
        self,
        works: Sequence[Work | StagedCall | LocalCall | InBackground],
        tensors: Sequence[torch.Tensor],
        copy_back: Callable[[], object] | None = None,
        source: int | None = -1,
        devices: Sequence[Device] = (),
        *,
        number: int = 0,
    ) -> None:
        FinishedWork.__init__(self, tensors, number)
        self.devices = devices
        self.works = works
        self._source = source
        self._copy_back = copy_back
        self._lock = threading.Lock()
        self._completion: _Completion | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drive the call to its end, complete its future and run the callbacks.

        Also waits for callbacks that run on another thread, except inside a callback: two threads
        would wait for each other. `timeout` limits all of this wait, except for callbacks that this
        thread runs; zero or less: the call's own limit, and none for callbacks.

        Raises:
            TimedOut: `timeout` passed, and the call or its callbacks go on; or the call's own limit
                passed, and it has failed.
            ShoalError: the call failed, and its group has ended; its tensors may be partly folded.
        """
        if profiling():
            with torch.profiler.record_function("shoal:wait"):
                self._wait(timeout)
        else:
            self._wait(timeout)
        if _registering():
            unregister(self)
        return True

    def is_settled(self) -> bool:
        """Return True once torch no longer waits for this Work or its future."""
        completion = self._completion
        return self._all_done() if completion is None else completion.future.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of the list of tensors, the same object every time.

        If the call fails, or no thread can be started to complete the future, waiting for it
        raises torch's RuntimeError, which quotes the ShoalError.
        """
        if (looked_for := _future_for_lookup(self)) is not None:
            return looked_for
        with self._lock:
            if self._completion is not None:
                return self._completion.future
            completion = _Completion(len(self.works), self._results, self.devices)
            self._completion = completion
        if this_thread.held_back is not None:
            this_thread.held_back.append(self)
            return completion.future
        # NOT before the future is made: a wait that ended meanwhile would not complete it.
        if self._all_done():
            completion.finish()
            return completion.future
        if this_thread.no_thread is not None:
            completion.finish(this_thread.no_thread)
            return completion.future
        _pending[completion] = None
        try:
            # NOT under the lock: a finished work may call back at once.
            for work in self.works:
                work.on_done(completion.one_is_done)
        except ShoalError as error:
            completion.finish(error)  # another thread may hold the future by now
        return completion.future

    def is_completed(self) -> bool:
        """Return True if the call has ended; the tensors may then be used as after `wait`."""
        if not self._all_done():
            return False
        if self.exception() is None:
            self._results()
        return True

    def exception(self) -> ShoalError | None:
        """Return the error of a failed call; None if it is running or succeeded."""
        return next(filter(None, (work.error() for work in self.works)), None)

    def source_rank(self) -> int:
        """Return the group rank that sent a received message; -1 for other calls.

        A receive from any source knows the sender after its end.
        """
        source = cast("Any", self.works[0]).source if self._source is None else self._source
        return -1 if source is None else source

    def _wait(self, timeout: timedelta) -> None:
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        has_finished = True
        try:
            for work in self.works:
                work.wait(left_s(deadline))
            self.copy_back()
        finally:
            completion = self._completion  # a future requested from now on finds the call done
            if completion is not None and self._all_done():
                has_finished = completion.finish(deadline=deadline)
        if not has_finished:  # NOT in place of the call's own error
            raise TimedOut(
                f"waited {timeout_s:g} s for the callbacks of a call that has ended; they go on, "
                "on another thread"
            )

    def _results(self, why_not: ShoalError | None = None) -> list[torch.Tensor]:
        """Wait for all calls and return the tensors; raise `why_not`, or a call's error."""
        if why_not is not None:
            raise why_not
        for work in self.works:
            work.wait()
        self.copy_back()
        return list(self.tensors)

    def _all_done(self) -> bool:
        return all(work.done() for work in self.works)

    def copy_back(self) -> None:
        """Copy the results into the tensors, after the collectives. Idempotent."""
        if self._copy_back is None:
            return
        with self._lock:  # a second thread waits here until the results are in place
            if self._copy_back is not None:
                self._copy_back()
                self._copy_back = None


class _Completion:
    """A future that one thread completes; the same thread then runs the callbacks.

    Args:
        n_calls: the number of calls that must end first.
        results: returns the future's result or raises its error; takes the reason not to wait for
            the calls, or None. Like the callbacks it runs on its own streams, and it orders them
            behind the results.
        devices: the devices of the results.
    """

    def __init__(
        self,
        n_calls: int,
        results: Callable[[ShoalError | None], list[torch.Tensor]],
        devices: Sequence[Device] = (),
    ) -> None:
        # NOT Future.set_exception: C++ takes the exception for the result. DDP looks for tensors
        # in it, finds none, uses the first anyway and dies of SIGSEGV. An exception raised in a
        # callback becomes an error that C++ recognizes.
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
        except Closed:  # the program ends
            self.finish()
        except ShoalError as error:
            _fail_all(error)

    def finish(self, why_not: ShoalError | None = None, deadline: float | None = None) -> bool:
        """Complete the future and run its callbacks, or wait for the thread that does.

        Inside a callback, wait only until the future is complete. Return False if the other thread
        still runs callbacks at the deadline.
        """
        _pending.pop(self, None)
        if self._first.acquire(blocking=False):
            before = this_thread.n_held_before
            this_thread.n_held_before = len(this_thread.held_back or ())
            this_thread.n_completions += 1
            try:
                self._over.set_result(why_not)
            finally:
                this_thread.n_completions -= 1
                this_thread.n_held_before = before
                self._has_ended.set()
        elif not this_thread.n_completions:
            return self._has_ended.wait(left_s(deadline))
        elif not self.future.done():
            with contextlib.suppress(RuntimeError):  # the call's error
                _wait(self.future)
        return True


def left_s(deadline: float | None) -> float | None:
    """Return the seconds until a deadline by `time.monotonic`, at least 0; None without one."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


# The futures that wait for completion by shoal-futures threads, oldest first.
_pending: Final[dict[_Completion, None]] = {}


def _fail_all(why_not: ShoalError) -> None:
    """Complete all futures with an error, because no thread can be started.

    Their callbacks run on this thread. No other thread could complete the futures that a callback
    waits for: older futures, and futures that the callback requests.
    """
    this_thread.no_thread = why_not
    this_thread.n_completions += 1
    try:
        for completion in [*_pending]:
            completion.finish(why_not)
    finally:
        this_thread.n_completions -= 1
        this_thread.no_thread = None


class _ThisThread(threading.local):
    """The state of one thread.

    Attributes:
        n_completions: the number of nested completions whose callbacks this thread runs.
        held_back: inside a communication hook, the works whose futures are held back; else None.
        n_held_before: the number of these when the callback began that this thread runs; else 0.
        options: keywords for each of its calls on a group, besides torch's.
        lookup: a list for the Work inside a holder, while this thread looks for it; else None.
        no_thread: while this thread completes all futures, the reason for it; else None.
    """

    n_completions = 0
    held_back: list[PendingWork] | None = None
    n_held_before = 0
    options: Mapping[str, Any] = {}  # NOT a proxy, which takes 0.15 us longer in each call
    lookup: list[FinishedWork] | None = None
    no_thread: ShoalError | None = None


this_thread: Final = _ThisThread()


@contextlib.contextmanager
def calls_of_hook(subject: int, works: list[PendingWork]) -> Iterator[None]:
    """Attach `subject` to the calls of this thread, and defer their futures.

    A future that this thread requests within the context completes when its Work is waited for,
    and its callbacks run on the waiting thread, so their calls have the same order on all ranks.
    Its Work is added to `works`, and the caller waits for each. A hook that waits for any future
    waits for all `works` first, and gets the ShoalError of a failed one.
    """
    _let_hooks_wait()
    before, this_thread.held_back = this_thread.held_back, works
    try:
        with calls_with(subject=subject):
            yield
    finally:
        this_thread.held_back = before


_wait: Final[Any] = torch._C.Future.wait  # torch's own


@functools.cache
def _let_hooks_wait() -> None:
    """Make `wait` of torch's futures complete the futures held back on its thread.

    NOT by a subclass of Future: torch's C++ unwraps futures, and returns others
    (docs/decisions/0094).
    """

    @functools.wraps(_wait)
    def wait_in_hook(self: Any) -> Any:
        if works := this_thread.held_back:
            # A callback waits for its own calls first. If it waited for all, it would run the next
            # callback, which does the same: one level of recursion for each bucket.
            for work in itertools.islice(works, this_thread.n_held_before, None):
                work.wait()
            if not self.done():
                for work in works:  # callbacks add others meanwhile
                    work.wait()
        return _wait(self)

    torch._C.Future.wait = wait_in_hook  # type: ignore[method-assign]


@contextlib.contextmanager
def calls_with(**options: Any) -> Iterator[None]:
    """Pass these keywords, and no others, to the calls on groups that this thread starts.

    Args:
        options: `subject`, and `wire` for collectives that take it; see `Group`.
    """
    before, this_thread.options = this_thread.options, options
    try:
        yield
    finally:
        this_thread.options = before


@functools.cache
def _threads_of(_process_id: int) -> Threads:
    """Return the threads that complete futures and run callbacks; a fork's child has its own.

    NOT a single thread, nor shoal's completion thread: a callback may wait for another future, as
    DDP's PowerSGD hook does, and would block the thread that must complete it.
    """
    return Threads("shoal-futures", most=256)


@atexit.register
def _finish() -> None:
    """Wait for running callbacks before the groups are closed."""
    _threads_of(os.getpid()).finish(timeout_s=5.0)


class InBackground:
    """Runs `go`, which makes named calls, on its own thread. Has the interface of `shoal.Work`."""

    def __init__(self, go: Callable[[], None]) -> None:
        self._go = go
        self._end: Future[None] = Future()
        self._process_id = os.getpid()
        self._has_ended = False
        _threads_of(self._process_id).submit(self._run)

    def _run(self) -> None:
        go = self._go
        del self._go  # it may hold an earlier call
        try:
            self._end.set_result(go())
        except BaseException as error:  # noqa: BLE001 - wait() raises it
            self._end.set_exception(error)
        self._has_ended = True

    @property
    def _future(self) -> Future[None]:
        """The future of `go`; failed in a child forked before, which does not have the thread."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            if not self._has_ended:  # NOT `_end.done()`: the thread may have held its lock
                self._end = Future()
                self._end.set_exception(Closed("a forked child has no part in its parent's groups"))
        return self._end

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when `go` has returned; raise its error."""
        try:
            self._future.result(timeout_s)
        except FutureTimeout as error:
            if self._future.done():
                raise  # the calls' own error
            raise TimedOut(f"waited {timeout_s:g} s for calls on another thread") from error

    def done(self) -> bool:
        """Return True if `go` has ended."""
        return self._future.done()

    def error(self) -> Any:
        """Return the error that `go` raised, or None."""
        return self._future.exception() if self._future.done() else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """Run `callback(self)` when `go` has ended."""
        self._future.add_done_callback(lambda _: callback(self))


_NO_FUTURE: Final[torch.futures.Future[Any]] = torch.futures.Future()


def _future_for_lookup(work: FinishedWork) -> torch.futures.Future[Any] | None:
    """Record a Work that work_holders.py looks for, and return a dummy future; else return None."""
    if this_thread.lookup is None:
        return None
    this_thread.lookup.append(work)
    return _NO_FUTURE
