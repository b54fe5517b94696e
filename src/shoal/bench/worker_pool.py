"""The launcher's side of one library's processes: started once, idle between commands."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from shoal.bench.job import Failure
from shoal.bench.launch import Placement, start
from shoal.rendezvous.listener import hold_port

if TYPE_CHECKING:
    from shoal.bench.job import JobSpec

_START_S: Final = 60.0  # eight ranks that import torch on one slow core
_ANSWER_S: Final = 40.0  # a command takes a few seconds; beyond this, something hangs
_STOP_S: Final = 5.0
_FATE_S: Final = 0.5


class WorkerPool:
    """The processes of a running job, until the context ends, by force if they do not stop.

    Every method raises Failure if a rank fails, or takes longer than `answer_s`; the pool is then
    unusable.
    """

    def __init__(self, spec: JobSpec, placement: Placement, answer_s: float = _ANSWER_S) -> None:
        self.spec = spec
        self._answer_s = answer_s
        self._lines: list[IO[bytes]] = []
        self._controls: list[socket.socket] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        self._errors_path = Path(self._folder.name, "errors")
        self._held = hold_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._has_failed = False
        try:
            self._start(placement)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def ask(self, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send every rank a command; return the answers by rank."""
        command = json.dumps({"task": task, **arguments}).encode() + b"\n"
        for control in self._controls:
            with contextlib.suppress(BrokenPipeError):  # it died; _answer raises
                control.sendall(command)
        return self._answers(_STOP_S if task == "stop" else self._answer_s)

    def close(self) -> None:
        """Stop the processes and close the pool. Idempotent."""
        if self._controls and not self._has_failed:
            with contextlib.suppress(Failure):
                self.ask("stop")
        for line in self._lines:
            line.close()
        for control in self._controls:
            control.close()  # a rank that still runs ends itself when it sees this
        self._controls, self._lines = [], []
        for process in self._processes:
            _end(process)
        self._processes = []
        self._held.close()
        self._folder.cleanup()

    def _start(self, placement: Placement) -> None:
        path = Path(self._folder.name, "control")
        with socket.socket(socket.AF_UNIX) as server, self._errors_path.open("wb") as errors:
            server.bind(str(path))
            server.listen(self.spec.n_ranks)
            self._processes = start(self.spec, placement, path, errors, self._held.getsockname()[1])
            for control in self._accept_all(server):
                self._controls.append(control)
                self._lines.append(control.makefile("rb"))
        hellos = self._answers(self._start_s())
        # Ranks connect in any order; sort them by rank.
        order = sorted(range(self.spec.n_ranks), key=lambda index: int(hellos[index]["rank"]))
        self._lines = [self._lines[index] for index in order]
        self._controls = [self._controls[index] for index in order]

    def _accept_all(self, server: socket.socket) -> Iterator[socket.socket]:
        deadline_s = time.monotonic() + self._start_s()
        for _ in range(self.spec.n_ranks):
            # Wake up often enough to notice a process that died before it connected.
            while not select.select([server], [], [], 0.2)[0]:
                if any(process.poll() is not None for process in self._processes):
                    raise self._failure("did not start")
                if time.monotonic() > deadline_s:
                    raise self._failure(f"did not start within {self._start_s():.0f} s")
            yield server.accept()[0]

    def _start_s(self) -> float:
        """Return the limit for starting: longer if the user allows longer calls."""
        return max(_START_S, self._answer_s)

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return one line from every rank; the first reported error ends the wait."""
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._controls):
            waited_for = [rank for rank in range(len(self._controls)) if rank not in answers]
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([self._controls[r] for r in waited_for], [], [], left_s)
            if not ready:
                raise self._failure(f"ranks {waited_for} did not answer within {timeout_s:.0f} s")
            for rank in waited_for:
                if self._controls[rank] in ready:
                    answers[rank] = self._answer(rank)
        return [answers[rank] for rank in sorted(answers)]

    def _answer(self, rank: int) -> dict[str, Any]:
        line = b""
        with contextlib.suppress(ConnectionResetError):  # it died with a command unread
            line = self._lines[rank].readline()
        if not line:
            raise self._failure(f"rank {rank} died{self._fate()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._has_failed = True
            raise Failure(answer["error"])
        return answer

    def _fate(self) -> str:
        for process in self._processes:  # a dead process is detected at once, or within `_FATE_S`
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_FATE_S / len(self._processes))
        codes = {process.poll() or 0 for process in self._processes}
        names = sorted(signal.Signals(-code).name for code in codes if code < 0)
        return f", ended by {' and '.join(names)}" if names else ""

    def _failure(self, what: str) -> Failure:
        self._has_failed = True
        errors = self._errors_path.read_text(errors="replace").strip()
        last = errors.splitlines()[-1] if errors else ""
        return Failure(f"{what} ({last})" if last else what)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process; kill it and its children if it does not end by itself."""
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        # mpirun ends its ranks on SIGTERM; it could not on SIGKILL.
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, how)
                process.wait(_STOP_S)
                return


class StartedRanks:
    """The pools of a run, started at the first command to their library, until the context ends.

    `place` has the ranks of each library and ignores its name; a command may take `answer_s`.
    """

    def __init__(self, place: JobSpec, placement: Placement, answer_s: float) -> None:
        self._place, self._placement, self._answer_s = place, placement, answer_s
        self._pools: dict[str, WorkerPool] = {}
        self._unstartable: dict[str, str] = {}

    def __enter__(self) -> StartedRanks:
        return self

    def __exit__(self, *_error: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def ask(self, library: str, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a command on every rank of a library; return the answers by rank, or Failure."""
        if library in self._unstartable:
            raise Failure(self._unstartable[library])
        if library not in self._pools:
            spec = replace(self._place, library=library)
            try:
                self._pools[library] = WorkerPool(spec, self._placement, self._answer_s)
            except Failure as failure:
                self._unstartable[library] = str(failure)
                raise
        try:
            return self._pools[library].ask(task, **arguments)
        except Failure:
            self._pools.pop(library).close()
            raise
