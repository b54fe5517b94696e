"""Starts the Python threads of shoal; if one cannot start, the error names the limit."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from shoal.errors import Closed, ShoalError

_LOG: Final = logging.getLogger("shoal")


def start(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread; ShoalError if the system refuses."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as refused:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        raise ShoalError(
            f"could not start the thread {name}: {refused}; raise the limit of processes "
            f"(ulimit -u, now {allowed}) or the pids limit of the container"
        ) from None
    return thread


class Threads:
    """Runs jobs on threads that start when all others are busy and end after an idle second.

    At most `most` run at a time; with 1, jobs run in the order of `submit`. Threads: any.
    """

    _LINGER_S: Final = 1.0

    def __init__(self, name: str, most: int = 1) -> None:
        self._name, self._most = name, most
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._threads: set[threading.Thread] = set()
        self._n_idle = 0
        self._is_ending = False

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job on a thread; its exceptions are logged.

        Raises:
            ShoalError: the system refuses another thread; the job does not run.
            Closed: `finish` was called; the job does not run.
        """
        with self._changed:
            if self._is_ending:
                raise Closed(f"the thread {self._name} has ended and takes no more jobs")
            if len(self._jobs) >= self._n_idle and len(self._threads) < self._most:
                self._threads.add(start(self._name, self._run))
            self._jobs.append(job)
            self._changed.notify()

    def finish(self, timeout_s: float | None = None) -> None:
        """Refuse further jobs, wait up to `timeout_s` for the rest, and end the threads."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException:  # noqa: BLE001 - the thread serves others too
                _LOG.exception("a job of the thread %s failed", self._name)
            del job  # an idle thread must NOT keep the objects that the job refers to

    def _next(self) -> Callable[[], object] | None:
        """Wait for a job; None after an idle second or `finish`: the thread must end."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_ending, self._LINGER_S)
            self._n_idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads.remove(threading.current_thread())
            return None
