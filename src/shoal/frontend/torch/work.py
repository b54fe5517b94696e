"""What torch's collectives return: a Work to wait for, or a Future of the list of tensors."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shoal.errors import ShoalError
    from shoal.work import Work

NO_TIMEOUT: Final = timedelta(0)


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

    Threads: any; the future completes, and its callbacks run, on a thread of their own.

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
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
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
            self._future = torch.futures.Future()
        # NOT under the lock: a work that is done may call back at once.
        for work in self._works:
            work.on_done(self._one_is_done)
        if not self._works:
            self._complete(self._future)
        return self._future

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
            _futures_pool(os.getpid()).submit(self._complete, future)

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            result = self.result()
        except Exception as error:  # noqa: BLE001 - also a failing copy back: waiters must hear it
            _fail(future, error)
        else:
            future.set_result(result)


@functools.cache
def _futures_pool(_process_id: int) -> ThreadPoolExecutor:
    """The threads on which futures complete and run their callbacks: as many as are blocked.

    NOT one, and not shoal's completion thread: a callback of one future that waits for another, as
    DDP's PowerSGD hook does, would block the thread that is to complete the other.

    Args:
        _process_id: threads do not survive a fork, so a child gets a pool of its own.
    """
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="shoal-futures")


def _fail(future: torch.futures.Future[list[torch.Tensor]], error: Exception) -> None:
    """Complete a future with an error, which waiting for it raises."""

    # NOT by set_exception: that makes the exception itself the result. DDP looks for tensors in a
    # result, finds none, takes the first of them all the same and dies of SIGSEGV.
    def raise_error(_failure: object) -> None:
        raise error

    future._set_unwrap_func(raise_error)
    future.set_result(_Failure(error))  # type: ignore[arg-type]


class _Failure:
    """The result of a call that has none. Looking for tensors in it raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        # torch looks by pickling (torch._jit_internal._extract_tensors).
        raise self._error
