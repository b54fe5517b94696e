"""`SHOAL_MONITOR`: a process serves its numbers to `shoal top`.

Readers on its host connect to a Unix socket in a folder that only its user can enter, and get one
JSON document per connection. Readers on other hosts need the job key (remote.py).
docs/top.md describes the document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal import threads
from shoal.errors import ShoalError, UsageError
from shoal.state.remote import MOST_ASKED, PATIENCE_S, VERSION, Answering
from shoal.state.stats import stats_of

if TYPE_CHECKING:
    from shoal.rendezvous.record import Endpoint

_LOG: Final = logging.getLogger("shoal")

_PAUSE_S: Final = 1.0  # after accept failed, such as for lack of a descriptor


class Monitor:
    """Serves one world of this process on a thread; OSError or ShoalError if that is impossible."""

    def __init__(self, source: Any) -> None:
        folder = _folders()[0]
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder)
        name = f"{source.epoch:016x}-{source.rank}-{os.getpid()}.sock"
        self._path, unready = folder / name, folder / f".{name}"
        self._pid, self._ended = os.getpid(), threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        self._source = weakref.ref(source)
        self._answering: Answering | None = None
        self._before: Monitor | None = None  # the monitor whose listener this one took over
        self.place: Endpoint | None = None
        """Where readers on other hosts connect."""
        self._monitors: list[tuple[int, str, str, int]] = []
        try:
            self._socket.bind(str(unready))
            self._socket.listen(16)
            # NOT named so before it listens: readers remove sockets that refuse connections.
            unready.rename(self._path)
            threads.start("shoal-monitor", self._serve)
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
            if self._before is not None and not self._before._ended.is_set():
                self._before._take_over(self)  # the group did not grow after all
            elif self._answering is not None:
                self._answering.submit(None)
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def answer(
        self,
        at: socket.socket | Monitor | None,
        place: Endpoint,
        job_key: bytes | None,
        monitors: list[tuple[int, str, str, int]],
    ) -> None:
        """Serve readers on other hosts too; log a warning if that is impossible.

        Args:
            at: a listener, owned from here on; or the monitor of the world from which this world
                has grown: this one takes over its listener until it is closed.
            place: the listener's address.
            job_key: readers must prove that they have it.
            monitors: each rank of the world, with its host, address and port for readers.
        """
        self._monitors, self.place = monitors, place
        if isinstance(at, Monitor):
            self._before, at._before = at, None
            self._take_over(at)
            return
        if at is None or job_key is None:
            return
        try:
            self._answering = Answering(at, job_key, self._document)
            threads.start("shoal-monitor", self._answering.run)
        except (OSError, ShoalError) as error:
            self.place = None
            _LOG.warning("shoal top on other hosts cannot read this process: %s", error)

    def _take_over(self, other: Monitor) -> None:
        self._answering, other._answering = other._answering, None
        self.place, other.place = other.place, None
        if self._answering is not None:
            self._answering.read = self._document

    def _serve(self) -> None:
        with self._socket:
            while not self._ended.is_set():
                try:
                    caller, _ = self._socket.accept()
                except OSError:
                    self._ended.wait(_PAUSE_S)
                    continue
                with caller, contextlib.suppress(OSError):  # the reader is gone, or too slow
                    _answer(caller, self._document)

    def _document(self) -> bytes:
        """Return the numbers of the world; empty if they cannot be read."""
        source = self._source()
        if source is None:
            return b""
        try:
            document = {
                "shoal_monitor": VERSION,
                "taken_at_s": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "slurm_job_id": os.environ.get("SLURM_JOB_ID", "unknown"),
                "monitors": self._monitors,
                **dataclasses.asdict(stats_of(source)),
            }
            return json.dumps(document).encode()
        except (AttributeError, LookupError, TypeError, ValueError):
            _LOG.exception("the numbers of this process cannot be read")
            return b""


def serve(source: Any) -> Monitor | None:
    """Serve the numbers of a world; log a warning and return None if that is impossible."""
    try:
        return Monitor(source)
    except (OSError, ShoalError) as error:
        _LOG.warning("shoal top cannot read this process: %s", error)
        return None


def _answer(caller: socket.socket, read: Callable[[], bytes]) -> None:
    caller.settimeout(PATIENCE_S)  # for the complete document
    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", peer)[1] == os.geteuid():
        caller.sendall(read())


def read_all() -> list[dict[str, Any]]:
    """Return the documents of all worlds of this user on this host, within two seconds.

    A process that does not answer gets one with `world`, `rank`, `pid` and `error`. Removes sockets
    of killed processes. UsageError: other users can enter the folder of the sockets.
    """
    documents: list[dict[str, Any]] = []
    readers = threads.Threads("shoal top", MOST_ASKED)
    for folder in filter(Path.is_dir, _folders()):
        _check(folder)
        for path in folder.glob("[!.]*.sock"):
            readers.submit(functools.partial(_read, path, documents))
    readers.finish()
    return sorted(documents, key=lambda one: (one["world"], one["rank"]))


def _read(path: Path, documents: list[dict[str, Any]]) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(PATIENCE_S)
            caller.connect(str(path))
            with caller.makefile("rb") as answer:
                text = answer.read()
        if text:  # else the world has just ended
            documents.append(dict(json.loads(text)))
    except FileNotFoundError:
        pass  # the world has just ended
    except ConnectionRefusedError:  # the process was killed
        path.unlink(missing_ok=True)
    except (OSError, ValueError):
        world, rank, pid = path.stem.split("-")
        error = "it does not answer"
        documents.append({"world": world, "rank": int(rank), "pid": int(pid), "error": error})


def _folders() -> list[Path]:
    """Return the folders that may hold sockets; new ones go into the first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    shared = Path(f"/tmp/shoal-{os.geteuid()}")
    return [Path(runtime, "shoal"), shared] if runtime and os.path.isdir(runtime) else [shared]


def _check(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} must be a folder that only this user can enter: remove it")
