"""Serves one view of a job in a separate process, so that its faults do not harm other jobs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shoal.errors import ShoalError
from shoal.server.serve import serve

if TYPE_CHECKING:
    from shoal.group.pool.protocol import Meet

_LOG: Final = logging.getLogger("shoal")
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ASKING: Final = (signal.SIGTERM, signal.SIGINT)
# For the interpreter, stacks and sockets, besides the windows.
_BESIDES_BYTES: Final = 512 << 20


def start(meet: Meet, key_path: str, memory_bytes: int, listeners: list[int]) -> tuple[int, int]:
    """Fork a child that serves this view; return its process id, and the pipe of its reports.

    Always closes the listeners, which the child keeps. OSError if no child can be started.
    """

    def work() -> None:
        _limit(memory_bytes)
        for name in ("SHOAL_KEY", "MASTER_ADDR"):  # from the server's shell
            os.environ.pop(name, None)
        os.environ["SHOAL_KEY_FILE"] = key_path
        os.environ["SHOAL_STAGING_BYTES"] = str(memory_bytes // 2)
        serve(meet, listeners, lambda report: _report(write, report))

    try:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)  # O_DIRECT keeps reports separate
        try:
            pid = fork(f"serving view {meet.view} as rank {meet.rank}", work, {write, *listeners})
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
    finally:
        for listener in listeners:
            os.close(listener)
    os.set_blocking(read, False)
    return pid, read


def fork(doing: str, work: Callable[[], None], kept: Iterable[int] = ()) -> int:
    """Fork a child that only does `work`, and is killed with this process; return its process id.

    The child has its own session, keeps only `kept` and the standard descriptors open, and ignores
    SIGTERM and SIGINT. It logs exceptions of `work`. OSError if no child can be started.
    """
    # Blocked until the child ignores them: NOT with the parent's handlers, which make it drain.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _be_child(doing, work, {*kept}, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _be_child(doing: str, work: Callable[[], None], kept: set[int], parent: int) -> NoReturn:
    """Run `work` and exit. Must NOT return or raise: the frames above belong to the parent."""
    code = 1
    try:
        _leave_parent(kept, parent)
        work()
        code = 0
    except (ShoalError, OSError, ValueError) as error:
        _LOG.warning("%s ended: %s", doing, error)
    except Exception:  # noqa: BLE001 - no exception of a child may reach the parent's frames
        _LOG.exception("%s failed", doing)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _leave_parent(kept: set[int], parent: int) -> None:
    os.setsid()
    # Killing a server kills its children, which are useless without it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    # A signal to all processes of a server makes the parent drain, which needs its children.
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
    # Close the parent's sockets; their objects live as long as this process, and never close them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for before, after in itertools.pairwise([2, *sorted(kept), most]):
        os.closerange(before + 1, after)


def _limit(memory_bytes: int) -> None:
    _, bound = resource.getrlimit(resource.RLIMIT_DATA)  # of the server's shell
    most = memory_bytes + _BESIDES_BYTES
    if bound != resource.RLIM_INFINITY:
        most = min(most, bound)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _report(pipe: int, report: dict[str, Any]) -> None:
    """Write a report; skip it if the parent reads too slowly, since the next one follows soon."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        os.write(pipe, json.dumps({**report, "at_s": time.time()}).encode()[: select.PIPE_BUF])
