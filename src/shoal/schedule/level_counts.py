"""Counts a hierarchy level by level, without running the steps of the whole.

A local step runs for every rail of its chunk, and the steps across for every rail of a finished
chunk. So each level is counted separately, for each size of a host and for each host, and the work
of a rank is the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from shoal.schedule.hierarchical import Cut, cut_of, data_and_scratch, teams_of
from shoal.schedule.steps import Copy, Recv, Send
from shoal.schedule.traffic import Counted, StepCounts, Traffic, sum_of

if TYPE_CHECKING:
    from shoal.schedule.algorithm import Algorithm


class _Run(NamedTuple):
    """Rails that a rank goes through one after the other."""

    n_rails: int
    is_written: bool
    """True if its host has folded data by then."""
    is_late: bool
    """True if the rank has passed data on inside its host."""


class _Inside(NamedTuple):
    """The work of a rank inside its host, and the rails that it runs between hosts."""

    work: StepCounts
    runs: tuple[_Run, ...]
    n_scratch: int

    @property
    def n_rails(self) -> int:
        """The number of rails that the rank owns."""
        return sum(run.n_rails for run in self.runs)


class _Across(NamedTuple):
    """The work of a rail's owner between hosts."""

    fresh: StepCounts
    """The work if the owner is alone on its host, so that nothing was folded before."""
    written: StepCounts
    n_scratch: int
    n_peers: int


def across_hosts(local: Algorithm, across: Algorithm, hosts: tuple[int, ...]) -> Counted:
    """Count all ranks of several hosts, at least one of them with several ranks."""
    teams = teams_of(local, hosts)
    far = _far(across, len(teams))
    kinds = dict.fromkeys((len(team.ranks), far[host]) for host, team in enumerate(teams))
    one_host = {len(team.ranks): host for host, team in enumerate(teams)}
    inside = {
        n_ranks: Counter(_near(local, cut_of(teams, host, across)))
        for n_ranks, host in one_host.items()
    }
    ranks: list[StepCounts] = []
    sums: list[StepCounts] = []
    for n_ranks, other in kinds:
        works = [(_both(near, other), n) for near, n in inside[n_ranks].items()]
        ranks += [work for work, _ in works]
        sums.append(sum_of(works))
    return Counted(
        ranks=ranks,
        hosts=sums,
        n_scratch=max(
            near.n_scratch + near.n_rails * other.n_scratch
            for n_ranks, other in kinds
            for near in inside[n_ranks]
        ),
        n_peers=max(other.n_peers for _, other in kinds),
    )


def _far(across: Algorithm, n_hosts: int) -> list[_Across]:
    """The work between hosts, by host."""
    known: dict[int, _Across] = {}
    stand_ins = [across.stand_in(host, n_hosts).rank for host in range(n_hosts)]
    for host in dict.fromkeys(stand_ins):
        fresh, written = (
            Traffic.of(across.steps(host, n_hosts), is_written=is_written)
            for is_written in (False, True)
        )
        n_scratch = len(across.scratch(host, n_hosts))
        known[host] = _Across(
            fresh.work(()), written.work(()), n_scratch, min(len(fresh.to), len(fresh.source))
        )
    return [known[host] for host in stand_ins]


def _near(local: Algorithm, cut: Cut) -> Iterator[_Inside]:
    """The work inside a host, by rank."""
    size = len(cut.team.ranks)
    # If all chunks have equally many rails, ranks with the same steps own equally many.
    is_even = cut.n_rails % len(cut.team.owned) == 0
    known: dict[int, _Inside] = {}
    for rank in range(size):
        stand_in = local.stand_in(rank, size).rank if is_even else rank
        if stand_in not in known:
            known[stand_in] = _of_rank(local, stand_in, size, cut)
        yield known[stand_in]


def _of_rank(local: Algorithm, rank: int, size: int, cut: Cut) -> _Inside:
    """Count a rank's local steps, each for all pieces of its chunk."""
    n_messages = n_moved = 0
    written: Counter[tuple[int, int]] = Counter()
    values: dict[tuple[int, int, int], int] = {}
    runs: list[_Run] = []
    is_late = False
    for step in local.steps(rank, size):
        chunk, _ = data_and_scratch(step)
        n_rails = len(cut.rails(chunk))
        n_pieces = n_rails * cut.n_across
        if isinstance(step, Send):
            version = written[step.buffer, step.chunk]
            values[step.buffer, step.chunk, version] = n_pieces
            n_messages += n_pieces
            is_late = is_late or version > 0
        elif isinstance(step, Recv):
            n_messages += n_pieces
            n_moved += n_pieces
            written[step.buffer, step.chunk] += 1
        elif isinstance(step, Copy):
            n_moved += n_pieces
            written[step.into_buffer, step.into] += 1
        else:
            runs.append(_Run(n_rails, written[step.buffer, step.chunk] > 0, is_late))
            written[step.buffer, step.chunk] += 1  # by the others' contributions
    return _Inside(
        StepCounts(intra=n_messages, shared=sum(values.values()), moved=n_moved),
        tuple(runs),
        sum(len(cut.rails(chunk)) * cut.n_across for chunk in local.scratch(rank, size)),
    )


def _both(near: _Inside, other: _Across) -> StepCounts:
    """The work of a rank inside its host and between hosts."""
    works, n_before, is_late = [(near.work, 1)], 0.0, False
    for run in near.runs:
        work = other.written if run.is_written else other.fresh
        is_late = is_late or run.is_late
        works.append((work, run.n_rails))
        n_before += 0 if is_late else work.before * (1 if work.passed_on else run.n_rails)
        is_late = is_late or work.passed_on > 0
    return sum_of(works)._replace(before=n_before)
