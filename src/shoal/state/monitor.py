"""`SHOAL_MONITOR`: a process answers on a Unix socket with its numbers, and `shoal top` asks.

The socket is in a folder that only its user can enter. Each connection is answered with one JSON
document, and closed. docs/top.md describes the document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Final

from shoal import threads
from shoal.errors import ShoalError, UsageError
from shoal.state.stats import stats_of

_LOG: Final = logging.getLogger("shoal")

VERSION: Final = 1
"""The version of the document; raised when a reader of the last one would misunderstand it."""

_PATIENCE_S: Final = 2.0  # of either end with the other
_PAUSE_S: Final = 1.0  # where no descriptor is left to accept a reader with


class Monitor:
    """The socket of one world of this process, and its thread; OSError or ShoalError for none."""

    def __init__(self, source: Any) -> None:
        folder = _folders()[0]
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder)
        name = f"{source.epoch:016x}-{source.rank}-{os.getpid()}.sock"
        self._path, unready = folder / name, folder / f".{name}"
        self._pid, self._ended = os.getpid(), threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(unready))
            self._socket.listen(16)
            # NOT under its name before it listens: readers remove sockets that refuse them.
            unready.rename(self._path)
            threads.start("shoal-monitor", self._serve, weakref.ref(source))
        except BaseException:
            self._socket.close()
            for path in (unready, self._path):
                path.unlink(missing_ok=True)
            raise
        weakref.finalize(source, self.close)

    def close(self) -> None:
        """Remove the socket; in a forked child, leave it to the parent. Idempotent."""
        if os.getpid() != self._pid:
            self._socket.close()
        elif not self._ended.is_set():
            self._ended.set()
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def _serve(self, source: weakref.ref[Any]) -> None:
        with self._socket:
            while not self._ended.is_set():
                try:
                    caller, _ = self._socket.accept()
                except OSError:
                    self._ended.wait(_PAUSE_S)
                    continue
                with caller, contextlib.suppress(OSError):  # the reader is gone, or too slow
                    try:
                        _answer(caller, source())
                    except (AttributeError, LookupError, TypeError, ValueError):
                        _LOG.exception("the numbers of this process cannot be read")


def serve(source: Any) -> Monitor | None:
    """Let readers ask for the numbers of a world; None, with a warning, if that cannot be."""
    try:
        return Monitor(source)
    except (OSError, ShoalError) as error:
        _LOG.warning("shoal top cannot read this process: %s", error)
        return None


def _answer(caller: socket.socket, source: Any) -> None:
    caller.settimeout(_PATIENCE_S)  # for all of the document
    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if source is not None and struct.unpack("3i", peer)[1] == os.geteuid():
        document = {
            "shoal_monitor": VERSION,
            "taken_at_s": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID", "unknown"),
            **dataclasses.asdict(stats_of(source)),
        }
        caller.sendall(json.dumps(document).encode())


def read_all() -> list[dict[str, Any]]:
    """Return the documents of all worlds of this user on this host, within two seconds.

    A process that does not answer has one with `rank`, `pid` and `error`. Sockets of processes
    that were killed are removed.

    Raises:
        UsageError: others can enter the folder of the sockets.
    """
    until = time.monotonic() + _PATIENCE_S
    callers: dict[Path, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for folder in filter(Path.is_dir, _folders()):
            _check(folder)
            for path in sorted(folder.glob("[!.]*.sock")):
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                with contextlib.suppress(FileNotFoundError):  # it has just ended
                    try:
                        caller.connect(str(path))
                    except ConnectionRefusedError:  # nobody listens any more
                        path.unlink(missing_ok=True)
                        continue
                    except BlockingIOError:  # too many wait for an answer already
                        pass
                    callers[path] = caller
        found = [_receive(path, caller, until) for path, caller in callers.items()]
    return sorted(filter(None, found), key=lambda one: (one["world"], one["rank"]))


def _receive(path: Path, caller: socket.socket, until: float) -> dict[str, Any] | None:
    """Return a document; None if its process ended meanwhile."""
    text, part = b"", b"-"
    try:
        while part:
            caller.settimeout(max(0.001, until - time.monotonic()))
            part = caller.recv(1 << 20)
            text += part
        return dict(json.loads(text)) if text else None
    except (OSError, ValueError):
        world, rank, pid = path.stem.split("-")
        error = "it does not answer"
        return {"world": world, "rank": int(rank), "pid": int(pid), "error": error}


def _folders() -> list[Path]:
    """Return where sockets may be; new ones are put in the first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    shared = Path(f"/tmp/shoal-{os.geteuid()}")
    return [Path(runtime, "shoal"), shared] if runtime and os.path.isdir(runtime) else [shared]


def _check(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} must be a folder that only this user can enter: remove it")
