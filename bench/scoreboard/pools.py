"""The pools of a run and their labs: started on demand, then kept."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.scoreboard.job import SuiteJob, spec_of
from bench.scoreboard.lab_servers import LabServers
from bench.scoreboard.mpi import OPENMPI, openmpi_command, openmpi_environment
from shoal.bench.job import Failure
from shoal.bench.launch import Placement
from shoal.bench.worker_pool import WorkerPool
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from bench.scoreboard.case import Case
    from shoal.bench.job import JobSpec
    from shoal.lab import Lab

_SERVED: Final = "serve"
"""The prefix of the names of libraries whose ranks use the servers of a case."""

_MAX_CALLS: Final = 200
# An idle NIC passes its first 128 KiB at once, 1 ms of the wire's time: little of a longer block.
_LONGER_ON_HOSTS: Final = 4


@dataclass(frozen=True)
class BenchOptions:
    """Options for the number of samples, and the environment of Open MPI.

    Args:
        openmpi: the environment with Open MPI.
        share_of_samples: the part of a case's samples to measure.
        block_s: seconds of calls in a row if a case has no number of calls.
        answer_s: the deadline of a command.
    """

    n_rounds: int
    openmpi: Path = Path(".venv-openmpi")
    share_of_samples: float = 1.0
    block_s: float = 0.01
    answer_s: float = 40.0


class _SuiteCall(NamedTuple):
    """A call of a table.

    Args:
        memory: "private", from torch or NumPy, or "shared", from shoal.empty.
        algorithm: empty for the library's own choice.
    """

    n_bytes: int
    collective: str
    memory: str
    algorithm: str

    def arguments(self) -> dict[str, Any]:
        """Return the command's arguments without the defaults, which ranks of MPI do not accept."""
        usual = ("memory", "private"), ("algorithm", "")
        return {name: value for name, value in self._asdict().items() if (name, value) not in usual}


class Sample(NamedTuple):
    """One call of one library: the slowest rank's seconds, and CPU seconds summed over ranks."""

    time_s: float
    cpu_s: float


class WorkerPools:
    """The running pools by spec. Leaving the context stops all processes and removes all labs."""

    def __init__(self, settings: BenchOptions) -> None:
        self.settings = settings
        self.n_cores = len(os.sched_getaffinity(0))
        self._stack = contextlib.ExitStack()
        self._pools: dict[SuiteJob, WorkerPool] = {}
        self._clusters: dict[SuiteJob, Lab] = {}
        self._servers: dict[SuiteJob, LabServers] = {}
        self._unstartable: dict[SuiteJob, str] = {}
        self._n_calls: dict[tuple[SuiteJob, _SuiteCall], int] = {}
        self._unable: dict[tuple[SuiteJob, str, str], str] = {}

    def __enter__(self) -> WorkerPools:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def sample(
        self, library: str, case: Case, memory: str = "private", algorithm: str = ""
    ) -> Sample:
        """Time one round of a case.

        Raises:
            Failure: the library cannot be started, has failed, or its result is wrong.
        """
        spec = spec_of(library, case)
        kind = (spec, case.collective, algorithm)
        if kind in self._unable:
            raise Failure(self._unable[kind])
        pool = self._pool(spec)
        what = _SuiteCall(case.n_bytes, case.collective, memory, algorithm)
        try:
            return self._sample(pool, spec, case, what)
        except Failure as failure:
            self._unable[kind] = str(failure)
            self._drop(spec)
            raise

    def choice(self, case: Case) -> str:
        """Return the planner's algorithm for a case; empty if its library has no planner."""
        what = {"collective": case.collective, "n_bytes": case.n_bytes}
        try:
            return str(self.ask("shoal", case, "choice", **what)[0]["name"])
        except Failure:
            return ""

    def ask(self, library: str, case: Case, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to every rank of a kept pool; return the answers by rank."""
        spec = spec_of(library, case)
        pool = self._pool(spec)
        try:
            return pool.ask(task, **arguments)
        except Failure:
            self._drop(spec)
            raise

    def fresh(self, library: str, case: Case) -> WorkerPool:
        """Start a new pool, which the caller stops."""
        spec = spec_of(library, case)
        return self._start(spec)

    def cluster(self, case: Case) -> Lab:
        """Return the lab of a case."""
        return self._lab(spec_of("", case))

    def servers(self, case: Case) -> LabServers:
        """Return the servers of a case, which have all been started."""
        return self._servers_of(spec_of("", case))

    def clear(self) -> None:
        """Stop all processes and remove all labs; later commands start new ones.

        A library that could not be started, or has failed, is tried again.
        """
        self._stack.close()
        for each in (self._pools, self._clusters, self._servers, self._n_calls):
            each.clear()
        for failures in (self._unstartable, self._unable):
            failures.clear()

    def forget(self) -> None:
        """Free the tensors of all pools."""
        for pool in self._pools.values():
            with contextlib.suppress(Failure):
                pool.ask("forget")
        self._n_calls.clear()

    def _pool(self, spec: SuiteJob) -> WorkerPool:
        if spec in self._unstartable:
            raise Failure(self._unstartable[spec])
        if spec not in self._pools:
            try:
                pool = self._start(spec)
            except Failure as failure:
                self._unstartable[spec] = str(failure)
                raise
            self._stack.callback(pool.close)
            self._pools[spec] = pool
        return self._pools[spec]

    def _start(self, spec: SuiteJob) -> WorkerPool:
        return WorkerPool(spec, self._surroundings(spec), self.settings.answer_s)

    def _drop(self, spec: SuiteJob) -> None:
        self._n_calls = {kind: n for kind, n in self._n_calls.items() if kind[0] != spec}
        self._pools.pop(spec).close()

    def _surroundings(self, spec: SuiteJob) -> Placement:
        servers = self._servers_of(spec).environment if spec.library.startswith(_SERVED) else {}
        lab = self._lab(spec) if spec.n_hosts else None
        launchers = {OPENMPI: self._launch_openmpi}
        return Placement(lab, servers, "bench.scoreboard.worker", launchers)

    def _launch_openmpi(
        self, spec: JobSpec, lab: Lab | None, scratch: Path
    ) -> tuple[list[str], dict[str, str]]:
        command = openmpi_command(spec, self.settings.openmpi, lab, scratch)
        return command, openmpi_environment(scratch)

    def _lab(self, spec: SuiteJob) -> Lab:
        if spec.place not in self._clusters:
            try:
                self._clusters[spec.place] = self._stack.enter_context(spec.lab())
            except ShoalError as error:
                raise Failure(str(error)) from error
        return self._clusters[spec.place]

    def _servers_of(self, spec: SuiteJob) -> LabServers:
        if spec.place not in self._servers:
            lab = self._lab(spec)
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))
            servers = LabServers(spec, lab, Path(folder, "servers"))
            self._servers[spec.place] = self._stack.enter_context(servers)
        return self._servers[spec.place]

    def _sample(self, pool: WorkerPool, spec: SuiteJob, case: Case, what: _SuiteCall) -> Sample:
        n_samples = max(1, round(case.n_samples * self.settings.share_of_samples))
        kind = (spec, what)
        if kind not in self._n_calls:
            self._check(pool, spec, what)
            once_s = _ask(pool, what, 1, 2).time_s if case.n_calls == 0 else 1.0
            block_s = self.settings.block_s * (_LONGER_ON_HOSTS if case.n_hosts else 1)
            fitting = case.n_calls or math.ceil(block_s / once_s)
            self._n_calls[kind] = min(fitting, _MAX_CALLS)
        return _ask(pool, what, self._n_calls[kind], n_samples)

    def _check(self, pool: WorkerPool, spec: SuiteJob, what: _SuiteCall) -> None:
        """Check the result of a call once, before it is timed."""
        n_wrong = sum(rank["n_wrong"] for rank in pool.ask("check", **what.arguments()))
        if n_wrong:
            raise Failure(f"WRONG RESULT: {n_wrong} elements of {spec}, {what}")


def slowest_of(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds of each sample on the slowest rank."""
    return [max(times_s) for times_s in zip(*(rank["times_s"] for rank in ranks), strict=True)]


def _ask(pool: WorkerPool, what: _SuiteCall, n_calls: int, n_samples: int) -> Sample:
    ranks = pool.ask("measure", **what.arguments(), n_calls=n_calls, n_samples=n_samples)
    cpu_s = sum(statistics.fmean(rank["cpu_s"]) for rank in ranks)
    return Sample(statistics.median(slowest_of(ranks)), cpu_s)
