"""Forkers: processes that have imported heavy modules and fork every rank, which starts at once.

A fork replaces a fresh interpreter only because the forker imports no module of shoal: every rank
loads shoal and its native core itself. There are two forkers of each kind, and ranks alternate
between them, so that neighbouring ranks differ in hash seed and address-space layout. All processes
of a pytest run share the forkers, because importing torch takes 3 s of a core: the first process
that needs a forker starts it, and the forker exits after the last of them.

Variables that Python or a library reads while it loads are those of the first process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

N_FORKERS = 2
_ALONE_S = 1.0  # seconds that a forker waits for its first connection

_forkers: dict[tuple[str, int], Forker] = {}


def forker_for(rank: int, modules: str) -> Forker:
    """Return the forker for this rank, which finds these modules imported (with spaces between)."""
    key = modules, rank % N_FORKERS
    if key not in _forkers:
        _forkers[key] = Forker(*key)
    return _forkers[key]


class Forker:
    """A connection to a process that forks ranks, started if none runs."""

    def __init__(self, modules: str, number: int) -> None:
        # Its address, in the abstract namespace, vanishes with its listener.
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = f"\0shoal-tests {run} {number} {modules}"
        _start_if_none(address, modules)
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while self._control.connect_ex(address) == errno.ECONNREFUSED:
            os.sched_yield()  # bound and not yet open, or its process has just ended
            _start_if_none(address, modules)
        atexit.register(self._control.close)

    def start(self, task: bytes, env: Mapping[str, str], output: int, result: int) -> Fork:
        """Fork a rank with this environment, which reads its task from a file or pipe."""
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(dict(env)) + task)
            request.seek(0)
            fds = [request.fileno(), output, result, theirs.fileno()]
            socket.send_fds(self._control, [b"."], fds)
        return Fork(ours)


class Fork:
    """A forked rank, and its exit status once it has ended."""

    def __init__(self, nurse: socket.socket) -> None:
        self._nurse = nurse
        self.returncode: int | None = None
        self.pid = self._read()

    def ends_within(self, timeout_s: float | None) -> bool:
        """Wait for its end, for this time or, with None, for ever."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._nurse, select.POLLIN)
            if not poll.poll(None if timeout_s is None else 1e3 * timeout_s):
                return False
            self.returncode = self._read()
            self._nurse.close()  # from now on another process may have this pid
        return True

    def signal(self, number: signal.Signals) -> None:
        if not self.ends_within(0.0):
            os.kill(self.pid, number)

    def _read(self) -> int:
        data = self._nurse.recv(4)
        if not data:
            self._nurse.close()
            self.returncode = -signal.SIGKILL  # a rank does not outlive it
            raise AssertionError("the process that forks ranks has died; see its words on stderr")
        return int(struct.unpack("i", data)[0])


def _start_if_none(address: str, modules: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            listener.listen(64)
            _start_forker(listener, modules)


def _start_forker(listener: socket.socket, modules: str) -> None:
    ranks, null = str(Path(__file__).with_name("ranks.py")), os.open(os.devnull, os.O_RDWR)
    listener.set_inheritable(True)
    # NOT by subprocess, which warns of a child that outlives its parent.
    os.posix_spawn(
        sys.executable,
        [sys.executable, ranks, str(listener.fileno()), modules],
        {**os.environ, "OMP_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1)],
    )
    os.close(null)


def fork_ranks(listener_fd: int, modules: str) -> tuple[int, int]:
    """Fork a rank for every request. Returns in each rank: its task's descriptor, its result's."""
    for name in modules.split():
        with contextlib.suppress(ImportError):  # then no rank has it
            importlib.import_module(name)
    if "shoal._native" in sys.modules or len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"{modules} load shoal's native core or start threads: no rank can begin so")
    # The collector of an ending rank would visit all of it and so copy every page:
    # 0.65 s of processor time with torch, against 0.23 s with frozen objects.
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=listener_fd)
    sockets = [listener]
    while True:
        for fds in _requests(listener, sockets):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            server = os.getpid()
            if os.fork() == 0:
                for each in sockets:
                    each.close()
                die_with(server)
                return _nurse(*fds)
            for fd in fds:
                os.close(fd)


def _requests(listener: socket.socket, sockets: list[socket.socket]) -> Iterator[list[int]]:
    """Yield requests and accept connections; exit when no process is connected."""
    readable, _, _ = select.select(sockets, [], [], _ALONE_S if sockets == [listener] else None)
    if not readable:
        sys.exit()
    for each in readable:
        if each is listener:
            sockets.append(listener.accept()[0])
            continue
        message, fds, _, _ = socket.recv_fds(each, 1, 4)
        if message:
            yield fds
        else:
            sockets.remove(each)
            each.close()


def end_fork() -> None:
    """End a forked rank; above rank 0, without tearing down modules and libraries.

    The teardown would copy most shared pages: 0.05 s of processor time with NumPy, and 0.25 s
    with torch. Threads are joined and exit functions run on every rank.
    """
    if os.environ.get("RANK", "0") == "0":
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _nurse(request: int, output: int, result: int, test: int) -> tuple[int, int]:
    """Fork one rank, send the test its pid and its exit status; return in the rank.

    The rank is killed if the test's process ends before it does.
    """
    nurse, rank = os.getpid(), os.fork()
    if rank:
        os.close(output)
        os.close(result)
        os.write(test, struct.pack("i", rank))
        end_or_test = select.poll()
        end_or_test.register(os.pidfd_open(rank), select.POLLIN)
        end_or_test.register(test, select.POLLHUP)
        if test in dict(end_or_test.poll()):
            os.kill(rank, signal.SIGKILL)  # it may be dead, but is not reaped
        end = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with contextlib.suppress(OSError):
            os.write(test, struct.pack("i", code))
            os.read(test, 1)  # NOT reaped before the test knows: the test may be about to signal it
        os._exit(0)
    os.close(test)
    die_with(nurse)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    return request, result


def die_with(parent: int) -> None:
    """Be killed when the parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the test ended while this rank was starting")
