"""The children of a server: one process for each view of a job, and its last report."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import select
import selectors
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.plan.text import counted

_LOG: Final = logging.getLogger("shoal")

# A child reports twice a second once its view has formed (3 s at most). Workers give up a stopped
# child long before this.
SILENT_S: Final = 10.0


@dataclass
class _View:
    """A child of this job's key; `pidfd` is readable once it has ended."""

    pid: int
    pidfd: int
    pipe: int
    key: int
    job: str
    reported_at: float
    report: dict[str, Any] = field(default_factory=dict)


class Views:
    """The children, in the order of their start."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._views: list[_View] = []

    @property
    def n(self) -> int:
        return len(self._views)

    def keys(self) -> set[int]:
        """Return the numbers of the keys whose jobs have views."""
        return {view.key for view in self._views}

    def add(self, pid: int, pipe: int, key: int, job: str) -> None:
        """Watch a child, and own it and its pipe; OSError if no descriptor is left: kills it."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
            raise
        view = _View(pid, pidfd, pipe, key, job, time.monotonic())
        self._views.append(view)
        self._selector.register(pipe, selectors.EVENT_READ, functools.partial(self._read, view))
        self._selector.register(
            view.pidfd, selectors.EVENT_READ, functools.partial(self._ended, view)
        )

    def reports_of(self, key: int | None) -> list[dict[str, Any]]:
        """Return the last reports of the views of one key, or of all."""
        chosen = [view for view in self._views if key is None or view.key == key]
        return [{**view.report, "job": view.job, "pid": view.pid} for view in chosen]

    def make_room(self, key: int, job: str | None, most: int) -> None:
        """End the oldest views of a job, or of all jobs of the key, to leave fewer than `most`."""
        own = [view for view in self._views if view.key == key and job in (None, view.job)]
        for view in own[: max(0, len(own) - most + 1)]:
            _LOG.warning("job %r has %s: ending the oldest", view.job, counted(len(own), "view"))
            self._kill(view)

    def expire(self, now: float) -> None:
        """End children that have been silent for `SILENT_S`: they are stopped or stuck."""
        for view in [one for one in self._views if now >= one.reported_at + SILENT_S]:
            self._read(view)  # this process itself may have been stopped
            if view.reported_at > now - SILENT_S:
                continue
            _LOG.warning(
                "job %r: process %d was silent for %g s: ending it",
                *(view.job, view.pid, SILENT_S),
            )
            self._kill(view)

    def next_deadline(self) -> float | None:
        """Return when to call `expire` again."""
        return min((view.reported_at + SILENT_S for view in self._views), default=None)

    def kill_all(self) -> None:
        """End all children."""
        for view in list(self._views):
            self._kill(view)

    def _read(self, view: _View) -> None:
        if view.pipe < 0:
            return
        try:
            data = os.read(view.pipe, select.PIPE_BUF)  # one report: the pipe keeps them apart
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget_pipe(view)
            return
        view.reported_at = time.monotonic()
        with contextlib.suppress(ValueError):
            report = json.loads(data)
            view.report = report if isinstance(report, dict) else view.report

    def _ended(self, view: _View) -> None:
        if view not in self._views:
            return
        _, status = os.waitpid(view.pid, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            _LOG.warning("job %r: process %d was killed by %s", view.job, view.pid, name)
        self._views.remove(view)
        self._selector.unregister(view.pidfd)
        os.close(view.pidfd)
        self._forget_pipe(view)

    def _kill(self, view: _View) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(view.pid, signal.SIGKILL)
        self._ended(view)

    def _forget_pipe(self, view: _View) -> None:
        if view.pipe >= 0:
            self._selector.unregister(view.pipe)
            os.close(view.pipe)
            view.pipe = -1
