"""The children of a server: a process for each view of a job, and what it told last."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import selectors
import signal
from dataclasses import dataclass, field
from typing import Any, Final

_LOG: Final = logging.getLogger("shoal")

_MOST_UNREAD: Final = 64 << 10  # of a pipe; a line is shorter than one page


@dataclass
class _View:
    """A child.

    Args:
        pidfd: turns readable when it has ended.
        key: the number of its job's key.
    """

    pid: int
    pidfd: int
    pipe: int
    key: int
    job: str
    unread: bytes = b""
    told: dict[str, Any] = field(default_factory=dict)


class Views:
    """All of them, in the order in which they began."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._views: list[_View] = []

    @property
    def n(self) -> int:
        """How many are served."""
        return len(self._views)

    def keys(self) -> set[int]:
        """Whose they are."""
        return {view.key for view in self._views}

    def add(self, pid: int, pipe: int, key: int, job: str) -> None:
        """Watch over a child; owns it and its pipe.

        Raises:
            OSError: no descriptor can be had; the child is ended.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
            raise
        view = _View(pid, pidfd, pipe, key, job)
        self._views.append(view)
        self._selector.register(pipe, selectors.EVENT_READ, functools.partial(self._read, view))
        self._selector.register(
            view.pidfd, selectors.EVENT_READ, functools.partial(self._ended, view)
        )

    def told_of(self, key: int | None) -> list[dict[str, Any]]:
        """What the views of one job, or of all, have told last."""
        chosen = [view for view in self._views if key is None or view.key == key]
        return [{**view.told, "job": view.job, "pid": view.pid} for view in chosen]

    def make_room(self, key: int, most: int) -> None:
        """End the oldest views of a job that has as many as this."""
        own = [view for view in self._views if view.key == key]
        for view in own[: max(0, len(own) - most + 1)]:
            _LOG.warning("job %r has %d views: the oldest is ended", view.job, len(own))
            self._kill(view)

    def kill_all(self) -> None:
        """End all that are left."""
        for view in list(self._views):
            self._kill(view)

    def _read(self, view: _View) -> None:
        try:
            data = os.read(view.pipe, _MOST_UNREAD)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget_pipe(view)
            return
        *lines, view.unread = (view.unread + data).split(b"\n")
        if len(view.unread) > _MOST_UNREAD:
            view.unread = b""
        for line in lines:
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                view.told = told if isinstance(told, dict) else view.told

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
