"""Estimates the time of a schedule on a described cluster, and the bytes over each link.

It plays the engine's steps against a clock, segment by segment; each step runs as soon as its
inputs are ready, and the ranks of a host share its NIC and its cores. docs/simulation.md compares
the results with papers and with the engine itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.analysis.dataflow import Dataflow
from shoal.analysis.simulate.events import EventSimulation
from shoal.analysis.simulate.symmetry import StepsOf, flow_of_blocks, interleaved
from shoal.analysis.simulate.timeline import Recorder, Timeline
from shoal.errors import UsageError
from shoal.limits import SEGMENT_BYTES
from shoal.schedule import Algorithm, Buffer, Copy, Finish, Place, Send, Step, find, row_of
from shoal.shapes import cut

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster

# Every rank of a schedule with fewer steps is simulated, even if ranks are alike.
_FEW_STEPS: Final = 50_000
# Longer schedules would take minutes and gigabytes.
_MAX_STEPS: Final = 1_000_000
# In longer schedules only the first segments of each chunk are simulated.
_MAX_SEGMENTS: Final = 600_000
# Chunks of several calls at a time are numbered apart.
_CALL: Final = 1 << 32

Length = Callable[[int, Place], int]
_Kind = Callable[..., EventSimulation]


class LinkLoad(NamedTuple):
    """The bytes over the link from one rank to another, and the number of links like it."""

    source: int
    peer: int
    n_bytes: int
    n_alike: int


class NicLoad(NamedTuple):
    """The bytes over the NIC of a host, each way."""

    host: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation. Only ranks and hosts that stand for others are named."""

    time_us: float
    rounds: int
    """Messages in the longest chain in which each waits for the end of the one before it."""
    n_bytes: int
    """Bytes of the collective's longest buffer. More than requested if chunks were counted as
    equally long, so that some ranks can stand for all."""
    n_simulated: int
    """The number of simulated ranks, each standing for an equal number of ranks."""
    links: tuple[LinkLoad, ...]
    nics: tuple[NicLoad, ...]
    """The NICs of the simulated ranks' hosts; empty if there is only one host."""
    busiest: str
    """The link or NIC that is busy for longest."""
    busy_us: float
    """The time for which its bytes occupy it."""
    timeline: Timeline | None
    """The activity of NICs over time; None if not requested, or there is only one host."""

    def sent(self, rank: int) -> int:
        """Return the bytes that one of the simulated ranks sends."""
        return sum(link.n_bytes for link in self.links if link.source == rank)


def simulate(  # noqa: PLR0913 - most of them have defaults
    collective: str,
    algorithm: str | Algorithm,
    cluster: Cluster,
    n_bytes: int,
    *,
    root: int = 0,
    n_calls: int = 1,
    segment: int = SEGMENT_BYTES,
    records: bool = False,
) -> Simulation:
    """Simulate one collective.

    Args:
        algorithm: the name of one of `ALGORITHMS[collective]`, or another algorithm.
        n_bytes: bytes of the in-place buffer, or of one rank's block if input and output differ.
        n_calls: simultaneous calls, each with its own buffer.
        segment: the bytes of a segment, if not the engine's.
        records: also return the timeline of the NICs.

    Raises:
        UsageError: there is no such algorithm, numbers are out of range, or a schedule of more than
            a million steps has no two ranks that are alike.

    Cost: 4 us for each segment of each step. If ranks are alike, a few stand for all; from 600,000
        segments on, the first segments of each chunk give the time of the others.

    The result numbers workers and servers of an algorithm alternately: with 6 workers and 4 servers
    ranks 0 to 2 are workers, 3 and 4 servers, 5 to 7 workers again.
    """
    if isinstance(algorithm, str):
        algorithm = find(collective, algorithm)
    if n_bytes < 0 or min(n_calls, segment) < 1 or not 0 <= root < cluster.size:
        raise UsageError(
            f"cannot simulate {n_calls} calls of {n_bytes} B in segments of {segment} B with root "
            f"{root} over {cluster.size} ranks"
        )
    size, hosts = cluster.size, cluster.hosts
    fitted, has_servers = algorithm.fitted(n_bytes, size), algorithm.n_servers > 0
    if has_servers:
        fitted = interleaved(fitted, size)

    @functools.cache
    def steps_of(rank: int) -> list[Step]:
        return list(_calls(fitted.steps(rank, size, root, hosts), n_calls))

    kind = functools.partial(Recorder if records else EventSimulation, has_servers=has_servers)
    lengths = _Lengths(collective, fitted, cluster, n_bytes, root)
    few = sum(len(steps_of(rank)) for rank in (0, size // 2, size - 1)) * size // 3
    if few > _FEW_STEPS and (flow := flow_of_blocks(steps_of, hosts, _MAX_STEPS)):
        lengths.even_out(flow.blocks.n_classes)
        played = _play(flow, cluster, lengths, flow.blocks.n_blocks, segment, kind)
    else:
        flow_of_all = Dataflow(_all_steps(collective, steps_of, size))
        played = _play(flow_of_all, cluster, lengths, 1, segment, kind)
    return replace(played, n_bytes=lengths.n_bytes)


def simulate_steps(
    schedule: Sequence[Sequence[Step]],
    cluster: Cluster,
    length: Length,
    *,
    segment: int = SEGMENT_BYTES,
) -> Simulation:
    """Simulate a schedule given rank by rank; `length(rank, place)` is the bytes of a place."""
    if len(schedule) != cluster.size:
        raise UsageError(f"{len(schedule)} ranks have steps, {cluster.size} have a host")
    kept = [[step for step in steps if not isinstance(step, Finish)] for steps in schedule]
    return _play(Dataflow(kept), cluster, length, 1, segment)


class _Lengths:
    """The lengths of the chunks, as the engine cuts them."""

    def __init__(
        self, collective: str, algorithm: Algorithm, cluster: Cluster, n_bytes: int, root: int
    ) -> None:
        size, hosts = cluster.size, cluster.hosts
        self._algorithm, self._size = algorithm, size
        n_chunks = algorithm.n_chunks(size, hosts)
        if row_of(collective).in_place:
            _, self._chunks = cut(algorithm, n_bytes, 1, size, hosts)
        else:
            self._chunks = [n_bytes] * n_chunks
        self._scratch = functools.cache(lambda rank: algorithm.scratch(rank, size, hosts, root))

    def __call__(self, rank: int, place: Place) -> int:
        chunk = place.chunk % _CALL
        return self._chunks[self._scratch(rank)[chunk] if place.buffer is Buffer.SCRATCH else chunk]

    def even_out(self, n_classes: int) -> None:
        """Make all chunks as long as the longest; with weights, as long as the first block's."""
        algorithm = self._algorithm
        if not algorithm.cut_rule or not algorithm.owner_rule:
            self._chunks = [self._chunks[0]] * len(self._chunks)
            return
        like: dict[tuple[int, int], int] = {}
        turns: Counter[int] = Counter()
        for chunk, length in enumerate(self._chunks):
            owner = algorithm.owner_rule(chunk, self._size)
            kind = owner % n_classes, turns[owner]
            turns[owner] += 1
            self._chunks[chunk] = like.setdefault(kind, length)

    @property
    def n_bytes(self) -> int:
        """The bytes of the longest buffer."""
        return sum(self._chunks)


def _calls(steps: Iterable[Step], n_calls: int) -> Iterator[Step]:
    """Yield the steps of several calls, without Finish, which only matters to an average."""
    kept = [step for step in steps if not isinstance(step, Finish)]
    yield from kept
    for first in range(_CALL, n_calls * _CALL, _CALL):
        for step in kept:
            if isinstance(step, Copy):
                yield step.replace(chunk=first + step.chunk, into=first + step.into)
            else:
                yield step.replace(chunk=first + step.chunk)


def _all_steps(collective: str, steps_of: StepsOf, size: int) -> list[Sequence[Step]]:
    schedule, n_steps = [], 0
    for rank in range(size):
        schedule.append(steps_of(rank))
        n_steps += len(schedule[-1])
        if n_steps > _MAX_STEPS:
            raise UsageError(
                f"{size} ranks make more than {_MAX_STEPS} steps, and no two of them are alike in "
                f"this {collective}: simulate fewer ranks, or another algorithm"
            )
    return schedule


def _play(
    flow: Dataflow,
    cluster: Cluster,
    length: Length,
    n_alike: int,
    segment: int,
    kind: _Kind = EventSimulation,
) -> Simulation:
    steps = list(zip(flow.rank_of, flow.steps, strict=True))
    lengths = [length(rank, Place(step.buffer, step.chunk)) for rank, step in steps]
    links, nics = _loads(steps, lengths, cluster, n_alike)
    busiest, busy_us = _busiest(links, nics, cluster)
    time_us, clock = _clock(flow, lengths, cluster, busy_us, segment, kind)
    rounds = max(flow.rounds(clock.order), default=0)
    timeline = clock.timeline() if isinstance(clock, Recorder) and nics else None
    return Simulation(time_us, rounds, 0, flow.size, links, nics, busiest, busy_us, timeline)


def _clock(
    flow: Dataflow,
    lengths: Sequence[int],
    cluster: Cluster,
    busy_us: float,
    segment: int,
    kind: _Kind,
) -> tuple[float, EventSimulation]:
    """Return the time of the last step, and the last run. Long chunks are cut short, twice.

    In a running pipeline every further segment takes as long as the one before, and at least its
    time on the busiest NIC.
    """
    n_segments = -(-sum(lengths) // segment)
    longest = -(-max(lengths, default=0) // segment)
    if n_segments <= _MAX_SEGMENTS or longest <= 4:
        clock = kind(flow, lengths, cluster, segment)
        return clock.run(), clock
    times, more = [], max(4, longest * _MAX_SEGMENTS // n_segments)
    for most in (more // 2, more):
        cut = [n - max(0, -(-n // segment) - most) * segment for n in lengths]
        clock = kind(flow, cut, cluster, segment)
        times.append(clock.run())
    each = max((times[1] - times[0]) / (more - more // 2), busy_us / longest)
    return times[1] + each * (longest - more), clock


def _loads(
    steps: Iterable[tuple[int, Step]], lengths: Sequence[int], cluster: Cluster, n_alike: int
) -> tuple[tuple[LinkLoad, ...], tuple[NicLoad, ...]]:
    links: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for (rank, step), n_bytes in zip(steps, lengths, strict=True):
        if isinstance(step, Copy | Finish):
            continue
        host = cluster.hosts[rank]
        if isinstance(step, Send):
            links[rank, step.peer] += n_bytes
        if host != cluster.hosts[step.peer]:
            (sent if isinstance(step, Send) else received)[host] += n_bytes
    return (
        tuple(LinkLoad(*ends, n_bytes, n_alike) for ends, n_bytes in links.items()),
        tuple(NicLoad(host, sent[host], received[host]) for host in sorted(sent | received)),
    )


def _busiest(
    links: Sequence[LinkLoad], nics: Sequence[NicLoad], cluster: Cluster
) -> tuple[str, float]:
    hosts, us_per_byte, loads = cluster.hosts, cluster.wire.us_per_byte, [(0.0, "none")]
    for nic in nics:
        loads.append((nic.sent * us_per_byte, f"the NIC out of host {nic.host}"))
        loads.append((nic.received * us_per_byte, f"the NIC into host {nic.host}"))
    for link in links:
        if hosts[link.source] == hosts[link.peer]:
            busy = link.n_bytes * cluster.local.us_per_byte
            loads.append((busy, f"the link from rank {link.source} to rank {link.peer}"))
    busy, name = max(loads, key=lambda load: load[0])
    return name, busy
