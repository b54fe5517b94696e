"""Runs a job's processes in a lab: starts them, passes on their output, ends them in order.

One thread polls everything at once: output, ends of processes (pidfd_open(2)), signals, and the
possibly slow reader of our own output. So no wait here can delay another event.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import UsageError
from shoal.lab.output import Lines, Output

if TYPE_CHECKING:
    from shoal.lab.cluster import Lab
    from shoal.lab.job import Task

# After SIGTERM a server gives its jobs up to 10 s.
_SERVER_GRACE_S: Final = 12.0
# A killed process is gone within milliseconds, unless it sleeps in the kernel.
_DEATH_S: Final = 5.0

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_CLONE_NEWUTS: Final = 0x04000000  # unshare(2)
_LIBC: Final = ctypes.CDLL(None)


def run_tasks(lab: Lab, tasks: Sequence[Task], grace_s: float, is_patient: bool = False) -> int:
    """Build a lab, run tasks in it, and always remove it.

    When the first task fails the others get SIGTERM, and SIGKILL if they still run `grace_s` later.
    Servers get SIGTERM after all other tasks have ended; a line reports a server that ends earlier,
    and the job goes on. With `is_patient` a failure ends no other task. SIGINT, SIGTERM and SIGHUP
    are passed on to all; a second signal kills.

    Returns: the exit status of the task that failed first, or 0. As in shells, 128 plus the number
        of the signal that killed a task, or that this process received.

    Raises:
        UsageError, Unsupported: as `Lab`, or a task cannot be started. Nothing is left behind.
        TimedOut: as `Lab`.
        BrokenPipeError: the reader of our output is gone. Nothing is left behind.
    """
    sys.stdout.flush()
    with _Signals() as signals, lab:
        run = _Run(lab, signals, grace_s, is_patient)
        try:
            run.start(tasks)
            return run.to_its_end()
        finally:
            run.close()


class _Signals:
    """Makes SIGINT, SIGTERM and SIGHUP readable from a descriptor within a context."""

    def __init__(self) -> None:
        self.fd, self._written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._wakeup_before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # An ignored signal stays ignored: SIGHUP under nohup.
            if signal.getsignal(number) != signal.SIG_IGN:
                # Python writes its number to the descriptor; the handler has nothing to do.
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._written)

    def read(self) -> bytes:
        """Return the numbers of the signals since the last call."""
        return os.read(self.fd, 4096)


class _Running:
    def __init__(self, task: Task, process: subprocess.Popen[str], pipes: list[Lines]) -> None:
        self.task = task
        self.process = process
        self.pipes = pipes
        self.pidfd = os.pidfd_open(process.pid)

    def send(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.process.returncode is None:  # NOT yet waited for, so the id is still its own
            os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Return its exit status; call it when its pidfd is readable."""
        status = self.process.wait(_DEATH_S)
        os.close(self.pidfd)
        return status if status >= 0 else 128 - status

    def fate(self) -> str:
        """Return a text about its end."""
        status = self.process.returncode
        if status < 0:
            return f"{self.task.label} was ended by {_signal_name(-status)}"
        return f"{self.task.label} ended with status {status}"


class _Run:
    def __init__(self, lab: Lab, signals: _Signals, grace_s: float, is_patient: bool) -> None:
        self._lab = lab
        self._signals = signals
        self._grace_s = grace_s
        self._is_patient = is_patient
        self._out, self._err = Output(sys.stdout.fileno()), Output(sys.stderr.fileno())
        self._running: list[_Running] = []
        self._pipes: list[Lines] = []
        self._status = 0
        self._n_signals = 0
        self._asked: str = ""  # after tasks were asked to end: the grace period and the signal
        self._deadline_s: float | None = None
        self._is_killing = False

    def start(self, tasks: Sequence[Task]) -> None:
        width = max(len(task.label) for task in tasks)
        for task in tasks:
            process = self._process_of(task)
            assert process.stdout is not None
            assert process.stderr is not None
            label = f"{task.label:<{width}}"
            pipes = [
                Lines(process.stdout, self._out, label),
                Lines(process.stderr, self._err, label),
            ]
            self._pipes += pipes
            self._running.append(_Running(task, process, pipes))

    def _process_of(self, task: Task) -> subprocess.Popen[str]:
        try:
            return self._lab.popen(
                task.host,
                task.argv,
                env=dict(task.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=partial(_prepare, self._lab.hosts[task.host].name),
            )
        except OSError as error:
            why = f"{error.strerror}; {len(self._running)} others run"
            raise UsageError(f"cannot start {task.label}: {why}") from error

    def to_its_end(self) -> int:
        """Wait until all have ended and all is printed; return the exit status."""
        while self._running:
            self._turn()
            self._keep_time()
        for pipe in self._pipes:
            pipe.read_rest()
            pipe.end()
        if self._n_signals == 0:
            self._deadline_s = None  # the reader may take its time
        while self._is_pending() and not self._is_late() and self._n_signals < 2:
            self._turn()
        return self._status

    def close(self) -> None:
        """Kill the tasks that still run; the lab kills their children."""
        for each in self._running:
            each.send(signal.SIGKILL)
        for each in self._running:
            with suppress(subprocess.TimeoutExpired):
                each.wait()
        self._running = []

    def _turn(self) -> None:
        poll, then = select.poll(), dict[int, Callable[[], None]]()

        def watch(fd: int, events: int, do: Callable[[], None]) -> None:
            poll.register(fd, events)
            then[fd] = do

        watch(self._signals.fd, select.POLLIN, self._heed_signals)
        for each in self._running:
            watch(each.pidfd, select.POLLIN, partial(self._ended, each))
        for pipe in self._pipes:
            if pipe.is_open and pipe.output.has_room:
                watch(pipe.fd, select.POLLIN, pipe.read)
        for output in (self._out, self._err):
            if output.is_pending:
                watch(output.fd, select.POLLOUT, output.write)
        for fd, _ in poll.poll(self._left_ms()):
            then[fd]()

    def _heed_signals(self) -> None:
        for number in self._signals.read():
            self._n_signals += 1
            if self._n_signals > 1:
                self._kill(f"received {_signal_name(number)} too")
            else:
                self._status = self._status or 128 + number
                self._end(number, self._grace_s)

    def _ended(self, each: _Running) -> None:
        status = each.wait()
        self._running.remove(each)
        for pipe in each.pipes:
            pipe.read_rest()
        n_left = sum(not other.task.is_server for other in self._running)
        if each.task.is_server:
            if not self._asked:
                self._err.add_own(f"{each.fate()}; the job goes on")
            return
        self._status = self._status or status
        if status and not self._asked:
            then = "; the others go on" if self._is_patient else f"; ending the other {n_left}"
            self._err.add_own(f"{each.fate()}{then if n_left else ''}")
        if self._asked:
            return
        if n_left == 0:
            self._end(signal.SIGTERM, _SERVER_GRACE_S)
        elif status and not self._is_patient:
            self._end(signal.SIGTERM, self._grace_s)

    def _end(self, number: int, grace_s: float) -> None:
        for each in self._running:
            each.send(number)
        self._asked = f"{grace_s:g} s after {_signal_name(number)}"
        self._deadline_s = time.monotonic() + grace_s

    def _keep_time(self) -> None:
        if not self._is_late() or not self._running:
            return
        if not self._is_killing:
            self._kill(self._asked)
        else:
            self._err.add_own(f"{self._names()} did not die within {_DEATH_S:g} s of SIGKILL")
            self._running = []

    def _kill(self, when: str) -> None:
        if self._running:
            self._err.add_own(f"{when}: killing {self._names()}")
        for each in self._running:
            each.send(signal.SIGKILL)
        self._is_killing = True
        self._deadline_s = time.monotonic() + _DEATH_S

    def _names(self) -> str:
        return ", ".join(each.task.label for each in self._running)

    def _is_pending(self) -> bool:
        return self._out.is_pending or self._err.is_pending

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _left_ms(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic()) * 1000


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _prepare(host_name: str) -> None:
    """Set up a task's process before it starts.

    It gets its own process group: an interrupt at the terminal reaches only the lab, which ends its
    tasks in order. NOT a session: the scheduler divides the cores by session. If the lab is killed,
    so is the task. It gets its own host name, which errors show.
    """
    os.setpgrp()
    if _LIBC.unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(host_name)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
