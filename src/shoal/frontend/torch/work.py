"""What torch's collectives return: a Work to wait for, or a Future of the list of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shoal.errors import ShoalError
    from shoal.work import Work

NO_TIMEOUT: Final = timedelta(0)

_Future: Final[Any] = torch.futures.Future


class FinishedWork(dist.Work):
    """A call that was over when it returned."""

    def __init__(self, tensors: Sequence[torch.Tensor], source: int = -1) -> None:
        dist.Work.__init__(self)
        self._tensors = tensors
        self._source = source

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self._tensors))
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
        return list(self._tensors)

    def synchronize(self) -> None:
        """Wait: tensors in CPU memory have no stream to order after the call."""
        self.wait()

    def source_rank(self) -> int:
        """The group's rank that sent what was received; -1 for everything but a receive."""
        return self._source

    _source_rank = source_rank  # what torch.distributed.recv calls


class PendingWork(FinishedWork):
    """A call that is under way, made of one collective or several.

    Threads: any; unless somebody waits for it, the future completes on shoal's completion thread.

    Args:
        works: the collectives. They keep the tensors alive while they run.
        tensors: the result, as the future gives it.
        copy_back: brings the results from stand-ins into the tensors; None if there are none. It
            runs once, before a wait returns and before the future is done.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[torch.Tensor],
        copy_back: Callable[[], None] | None = None,
        source: int = -1,
    ) -> None:
        FinishedWork.__init__(self, tensors, source)
        self._works = works
        self._copy_back = copy_back
        self._lock = threading.Lock()
        self._future: _DrivenFuture | None = None
        self._n_unfinished = len(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drive the call to its end.

        Args:
            timeout: for this wait; zero or less takes the call's own.

        Raises:
            ShoalError: the call failed; its tensors are partly folded, unless it is a UsageError.
        """
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        for work in self._works:
            work.wait(timeout_s)
        self._land()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The future of the list of tensors, the same one every time."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = _DrivenFuture(self)
        # NOT under the lock: a work that is done may call back at once.
        for work in self._works:
            work.on_done(self._one_is_done)
        if not self._works:
            future.complete()
        return future

    def is_completed(self) -> bool:
        """Whether the call is over, well or badly."""
        if not all(work.done() for work in self._works):
            return False
        if self.exception() is None:
            self._land()
        return True

    def is_success(self) -> bool:
        """Whether the call is over and did what it should."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> ShoalError | None:
        """Why the call failed; None if it did not, or is not over yet."""
        return next(filter(None, (work.error() for work in self._works)), None)

    def _land(self) -> None:
        if self._copy_back is None:
            return
        with self._lock:  # a second thread waits here until the results are in place
            if self._copy_back is not None:
                self._copy_back()
                self._copy_back = None

    def _one_is_done(self, _work: Work) -> None:
        with self._lock:
            self._n_unfinished -= 1
            future = None if self._n_unfinished else self._future
        if future is not None:
            future.complete()


class _DrivenFuture(_Future):  # type: ignore[misc]  # torch's is generic, but only for type checkers
    """A future whose waiter drives the call.

    With torch's own, a callback of one future that waits for another, as DDP's PowerSGD hook does,
    would block the only thread that completes futures.
    """

    def __init__(self, work: PendingWork) -> None:
        super().__init__()
        self._work: PendingWork | None = work
        self._lock = threading.Lock()

    def wait(self) -> Any:
        """Return the tensors once they hold the result.

        Raises:
            ShoalError: the call failed.
        """
        self.complete()
        return super().wait()

    def complete(self) -> None:
        """Drive the call to its end and take its outcome. Idempotent."""
        work = self._work
        if work is None:
            return
        result: list[torch.Tensor] = []
        error: Exception | None = None
        try:
            result = work.result()
        except Exception as caught:  # noqa: BLE001 - also a failing copy back: waiters must hear it
            error = caught
        with self._lock:
            if self._work is None:
                return
            self._work = None  # ends the cycle of references, and with it the tensors' lives
        if error is None:
            self.set_result(result)
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # NOT by set_exception: that makes the exception itself the result. DDP looks for tensors in
        # a result, finds none, takes the first of them all the same and dies of SIGSEGV.
        def raise_error(_failure: object) -> None:
            raise error

        self._set_unwrap_func(raise_error)
        self.set_result(_Failure(error))


class _Failure:
    """The result of a call that has none. Looking for tensors in it raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        # torch looks by pickling (torch._jit_internal._extract_tensors).
        raise self._error
