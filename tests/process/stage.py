"""Cues between a test and its ranks, through a store that outlives every rank.

    with on_stage(rank, 3) as (stage, ranks):
        stage.await_cue("rank 1 is about to call")
        os.kill(ranks.pid(1), signal.SIGKILL)

    def rank() -> None:
        stage = Stage.from_environment()
        stage.cue("rank 1 is about to call")

Times come from one clock of the machine: a test may subtract times of its ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from process.ranks import Ranks, start_ranks

from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

_LONG_S = 60.0
_ADDRESS = "127.0.0.1"


class Stage:
    """The test's side, or, from `from_environment`, a rank's side."""

    def __init__(self, port: int | None = None) -> None:
        self._server = TcpStoreServer(_ADDRESS, 0) if port is None else None
        self.port = self._server.port if self._server else port
        self.store = TcpStoreClient(_ADDRESS, self.port, timeout_s=_LONG_S)

    @classmethod
    def from_environment(cls) -> Stage:
        return cls(int(os.environ["STAGE_PORT"]))

    @property
    def env(self) -> Mapping[str, str]:
        return {"STAGE_PORT": str(self.port)}

    def cue(self, name: str) -> None:
        """Release everyone who awaits this cue, and record the time."""
        self.store.set(f"cue/{name}", str(time.monotonic()).encode())

    def await_cue(self, name: str, timeout_s: float = _LONG_S) -> float:
        """Wait for this cue, and return the time it was given."""
        return float(self.store.get(f"cue/{name}", timeout_s))

    def meet(self, rank: int, size: int, where: str, victim: int = -1) -> None:
        """Wait until all ranks are here, so that their earlier actions have ended everywhere.

        The victim then dies.
        """
        self.cue(f"rank {rank}: {where}")
        self.await_all(size, where)
        if rank == victim:
            die()

    def await_all(self, size: int, where: str) -> None:
        """Wait, from a process that is no rank, until all ranks are at `meet`."""
        for rank in range(size):
            self.await_cue(f"rank {rank}: {where}")

    def close(self) -> None:
        self.store.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextlib.contextmanager
def on_stage(
    function: Callable[..., Any], size: int, *args: Any, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Stage, Ranks]]:
    """Start ranks that share a stage with the test."""
    with Stage() as stage:
        ranks = start_ranks(function, size, *args, env={**stage.env, **(env or {})})
        with ranks:
            yield stage, ranks


def pretend_hosts(ranks_per_host: int) -> None:
    """On a rank, before it joins: make each `n` consecutive ranks count as one host."""
    os.environ["SHOAL_HOST_ID"] = str(int(os.environ["RANK"]) // ranks_per_host)


class Lines(logging.Handler):
    """The lines with these words that this process logs from now on."""

    def __init__(self, level: int = logging.INFO, words: str = "") -> None:
        super().__init__(level)
        self.texts: list[str] = []
        self._words = words
        logging.getLogger("shoal").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.texts.append(record.getMessage())


def die() -> None:
    """End this process as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)


def await_stop(pid: int) -> None:
    """Wait until each thread of a process has stopped."""
    threads = Path(f"/proc/{pid}/task")
    while any(" T " not in (one / "stat").read_text() for one in threads.iterdir()):
        os.sched_yield()


def descriptors() -> dict[int, str]:
    """Return the kernel's name of each file that this process holds open."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def holdings() -> dict[str, int]:
    """Count everything of this process that a group could leave behind."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum("memfd" in line for line in maps),
        "shared KiB": int(status["RssShmem"].split()[0]),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(maps),
        "resident KiB": int(status["VmRSS"].split()[0]),
        "objects": len(gc.get_objects()),
    }


def connections() -> list[socket.socket]:
    """Return the TCP connections of this process, each through a new descriptor."""
    found = []
    for number, target in descriptors().items():
        if target.startswith("socket:"):
            try:
                sock = socket.socket(fileno=os.dup(number))
            except OSError:  # another thread has closed it since
                continue
            is_listener = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if sock.family == socket.AF_INET and not is_listener:
                found.append(sock)
            else:
                sock.close()
    return found


def bytes_out() -> dict[int, int]:
    """Return the bytes each connection has sent, without retransmissions."""
    found = {}
    for connection in connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
            sent, again = struct.unpack_from("=QQ", info, 200)  # tcpi_bytes_sent, _retrans
            found[os.fstat(connection.fileno()).st_ino] = sent - again
    return found


def bytes_since(before: dict[int, int]) -> int:
    """Return the bytes sent since `bytes_out()` was `before`, on connections still open."""
    return sum(sent - before.get(which, 0) for which, sent in bytes_out().items())


def error_of(call: Callable[..., Any], *args: Any, **how: Any) -> Exception | None:
    """Return the error that the call raises, or None."""
    try:
        call(*args, **how)
    except Exception as error:  # noqa: BLE001 - the test checks it
        return error
    return None


def leave_at_once() -> None:
    """On a rank that uses Gloo: exit without destructors.

    After FSDP2 over Gloo, torch 2.13 aborts there in some processes: in 3 of 16 pairs of ranks, and
    in none over shoal.
    """
    atexit.register(os._exit, 0)
