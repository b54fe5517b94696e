"""All running teams of one run, and the clusters they stand in: started on demand, then kept."""

from __future__ import annotations

import contextlib
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.bench.failure import Failure
from shoal.bench.launch import Crew, Surroundings
from shoal.bench.team import Team
from shoal.errors import UsageError
from shoal.lab import Cluster

if TYPE_CHECKING:
    from shoal.bench.contest import Case


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure, and where Open MPI is installed."""

    n_rounds: int
    openmpi: Path
    share_of_samples: float = 1.0


class Sample(NamedTuple):
    """One call of one library: the slowest rank's seconds, and CPU seconds summed over ranks."""

    time_s: float
    cpu_s: float


class Teams:
    """Running teams by crew. Leaving the context stops all processes and removes all clusters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.n_cores = len(os.sched_getaffinity(0))
        self._stack = contextlib.ExitStack()
        self._teams: dict[Crew, Team] = {}
        self._clusters: dict[int, Cluster] = {}
        self._unstartable: dict[Crew, str] = {}
        self._checked: set[tuple[Team, int, str]] = set()

    def __enter__(self) -> Teams:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def sample(self, library: str, case: Case, memory: str = "private") -> Sample:
        """Time one round of a case.

        Raises:
            Failure: the library cannot be started, has failed, or its sum is wrong.
        """
        crew = Crew(library, case.n_ranks, case.n_hosts)
        team = self._team(crew)
        try:
            self._check(team, case.n_bytes, memory)
            n_samples = max(1, round(case.n_samples * self.settings.share_of_samples))
            counts = {"n_calls": case.n_calls, "n_samples": n_samples}
            ranks = team.ask("measure", n_bytes=case.n_bytes, memory=memory, **counts)
        except Failure:
            del self._teams[crew]
            team.close()
            raise
        slowest_s = [max(times_s) for times_s in zip(*(r["times_s"] for r in ranks), strict=True)]
        cpu_s = sum(statistics.fmean(rank["cpu_s"]) for rank in ranks)
        return Sample(statistics.median(slowest_s), cpu_s)

    def fresh(self, library: str, case: Case) -> Team:
        """A team that has done nothing yet; the caller stops it."""
        crew = Crew(library, case.n_ranks, case.n_hosts)
        return Team(crew, self._surroundings(crew))

    def cluster(self, n_hosts: int) -> Cluster:
        """A cluster of so many hosts at 1 Gbit/s."""
        if n_hosts not in self._clusters:
            try:
                self._clusters[n_hosts] = self._stack.enter_context(Cluster(n_hosts))
            except UsageError as error:
                raise Failure(str(error)) from error
        return self._clusters[n_hosts]

    def forget(self) -> None:
        """Free the tensors of all teams."""
        for team in self._teams.values():
            with contextlib.suppress(Failure):
                team.ask("forget")

    def _team(self, crew: Crew) -> Team:
        if crew in self._unstartable:
            raise Failure(self._unstartable[crew])
        if crew not in self._teams:
            try:
                team = Team(crew, self._surroundings(crew))
            except Failure as failure:
                self._unstartable[crew] = str(failure)
                raise
            self._teams[crew] = self._stack.enter_context(team)
        return self._teams[crew]

    def _surroundings(self, crew: Crew) -> Surroundings:
        cluster = self.cluster(crew.n_hosts) if crew.n_hosts else None
        return Surroundings(self.settings.openmpi, cluster)

    def _check(self, team: Team, n_bytes: int, memory: str) -> None:
        """Once per tensor: its sum is right. A wrong result's time is of no interest."""
        key = (team, n_bytes, memory)
        if key in self._checked:
            return
        n_wrong = sum(rank["n_wrong"] for rank in team.ask("check", n_bytes=n_bytes, memory=memory))
        if n_wrong:
            raise Failure(f"WRONG RESULT: {n_wrong} elements of {team.crew} at {n_bytes} B")
        self._checked.add(key)
