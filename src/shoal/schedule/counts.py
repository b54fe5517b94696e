"""What a schedule takes of ranks, hosts and NICs, counted from its steps.

All is counted in chunks, and in messages of a chunk each. What they cost is not known here.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.schedule.steps import Copy, Recv, Send

if TYPE_CHECKING:
    from shoal.schedule.algorithm import Algorithm
    from shoal.schedule.steps import Step

# How many steps are counted before hosts that are left are no longer asked for theirs, for each
# rank of the group; and what a rank costs besides its steps, in steps. More makes the first choice
# slower (goal: 0.5 s for 2,048 ranks), less tells hosts that differ less well.
_STEPS_PER_RANK: Final = 6
_STEPS_AT_LEAST: Final = 1000
_STEPS_TO_BEGIN: Final = 150
_N_TELLING: Final = 3  # ranks tell whether all are alike
# Of groups that are no larger, every rank is counted.
_FEW_RANKS: Final = 64
# Of larger ones so many hosts at least: that of a tree's root does less than those inside of it.
_FEW_HOSTS: Final = 4


class StepCounts(NamedTuple):
    """What one rank has to do, or all ranks of a host."""

    intra: float = 0
    """Messages to and from ranks of the same host."""
    inter: float = 0
    """Messages to and from other hosts."""
    shared: float = 0
    """Chunks copied for ranks of the same host: once, however many of them read that value."""
    moved: float = 0
    """Chunks copied or folded otherwise: of every receive, copy, and send to another host."""
    sent: float = 0
    """Chunks sent to other hosts."""
    received: float = 0
    """Chunks received from other hosts."""
    before: float = 0
    """Of these, those received before anything that was received or folded is passed on."""
    passed_on: float = 0
    """Of the chunks sent to other hosts, those that are so passed on."""


class Counts(NamedTuple):
    """What a schedule takes on some hosts."""

    n_chunks: int
    """That the longest buffer is cut into."""
    n_scratch: int
    """Chunks of scratch of the rank that has most."""
    ranks: tuple[StepCounts, ...]
    """Of those ranks that were counted, without repeating what is the same."""
    hosts: tuple[StepCounts, ...]
    """Of all ranks of their hosts, likewise."""
    n_intra: int
    """Messages of the longest chain that stay on a host."""
    n_inter: int
    """Messages of the longest chain that go to another."""
    n_peers: int
    """With how many other hosts one exchanges at most: sends to as many, receives from as many."""

    @property
    def n_rounds(self) -> int:
        """Messages of the longest chain."""
        return self.n_intra + self.n_inter


@functools.lru_cache(maxsize=4096)
def count(algorithm: Algorithm, hosts: tuple[int, ...]) -> Counts:
    """Count the steps of the ranks that matter, where rank 0 is the root.

    Where moving every rank by as many places turns the messages of one into those of another, one
    stands for all, and so where the first, the last and the middle one have as much to do.
    Otherwise every rank of a small group is counted, and of a large one all ranks of some hosts.

    Cost: proportional to the ranks of the group, once.
    """
    size = len(hosts)
    traffic, works = _counted(algorithm, hosts)
    chain = algorithm.chain(size, hosts)
    n_inter = sum(hosts[source] != hosts[to] for source, to in chain)
    return Counts(
        n_chunks=algorithm.n_chunks(size, hosts),
        n_scratch=max(len(algorithm.scratch(rank, size, hosts)) for rank in traffic),
        ranks=tuple(dict.fromkeys(works.values())),
        hosts=tuple(dict.fromkeys(_by_host(works, hosts))),
        n_intra=len(chain) - n_inter,
        n_inter=n_inter,
        n_peers=max(one.n_peers(rank, hosts) for rank, one in traffic.items()),
    )


def _counted(
    algorithm: Algorithm, hosts: tuple[int, ...]
) -> tuple[dict[int, _Traffic], dict[int, StepCounts]]:
    """The messages of some ranks, and what these or others have to do."""
    size = len(hosts)
    traffic: dict[int, _Traffic] = {}
    works: dict[int, StepCounts] = {}
    some = _of_some_hosts(hosts) if max(hosts) else (0, size - 1)
    for rank, steps in _some(algorithm, hosts):
        one = traffic[rank] = _Traffic.of(rank, size, steps)
        works[rank] = one.work(rank, hosts)
        if len(traffic) == 2 and len(set(traffic.values())) == 1:
            return traffic, {rank: one.work(rank, hosts) for rank in some}
        if len(traffic) == 3 and len(set(works.values())) == 1:
            return traffic, dict.fromkeys(some, works[rank])
    return traffic, works


class _Traffic(NamedTuple):
    """The messages of a rank, by how many places it is to their peers."""

    values: tuple[tuple[tuple[int, ...], bool, int], ...]
    """To whom it sends a value, whether it passes it on, and how many such values there are."""
    receives: tuple[tuple[int, bool, int], ...]
    """From whom it receives, whether that is before it passes anything on, and how often."""
    n_copies: int

    @classmethod
    def of(cls, rank: int, size: int, steps: Sequence[Step]) -> _Traffic:
        """Count the steps of a rank."""
        written: Counter[tuple[int, int]] = Counter()
        values = defaultdict[tuple[int, int, int], list[int]](list)
        receives: Counter[tuple[int, bool]] = Counter()
        n_copies, before = 0, True
        for step in steps:
            if isinstance(step, Send):
                version = written[step.buffer, step.chunk]
                values[step.buffer, step.chunk, version].append((step.peer - rank) % size)
                before = before and not version
            elif isinstance(step, Recv):
                receives[(step.peer - rank) % size, before] += 1
                written[step.buffer, step.chunk] += 1
            elif isinstance(step, Copy):
                n_copies += 1
                written[step.into_buffer, step.into] += 1
        sends = Counter((tuple(peers), value[2] > 0) for value, peers in values.items())
        return cls(
            tuple(sorted((*what, n) for what, n in sends.items())),
            tuple(sorted((*what, n) for what, n in receives.items())),
            n_copies,
        )

    def work(self, rank: int, hosts: tuple[int, ...]) -> StepCounts:
        """What that is for a rank of these hosts."""
        here, host_of = hosts[rank], (hosts[rank:] + hosts[:rank]).__getitem__
        intra = shared = n_received = 0
        sent, received = [0, 0], [0, 0]
        for peers, passed_on, n in self.values:
            near = [*map(host_of, peers)].count(here)
            intra += n * near
            shared += n * (near > 0)
            sent[passed_on] += n * (len(peers) - near)
        for peer, before, n in self.receives:
            n_received += n
            received[before] += n * (host_of(peer) != here)
        return StepCounts(
            intra=intra + n_received - sum(received),
            inter=sum(sent) + sum(received),
            shared=shared,
            moved=n_received + self.n_copies + sum(sent),
            sent=sum(sent),
            received=sum(received),
            before=received[True],
            passed_on=sent[True],
        )

    def n_peers(self, rank: int, hosts: tuple[int, ...]) -> int:
        """To how many other hosts it sends, or from how many it receives, if these are fewer."""
        here, host_of = hosts[rank], (hosts[rank:] + hosts[:rank]).__getitem__
        to = {host for peers, *_ in self.values for host in map(host_of, peers)}
        source = {host_of(peer) for peer, *_ in self.receives}
        return min(len(to - {here}), len(source - {here}))


def _some(algorithm: Algorithm, hosts: tuple[int, ...]) -> Iterator[tuple[int, list[Step]]]:
    """The steps of the ranks of as many hosts as there is time for."""
    size = len(hosts)
    left = _STEPS_PER_RANK * size + _STEPS_AT_LEAST
    n_hosts, last = 0, -1
    for place, rank in enumerate(_in_turn(hosts)):
        if place >= _N_TELLING and (hosts[rank] != last or not max(hosts)):
            if n_hosts >= _FEW_HOSTS * bool(max(hosts)) and left < 0 and size > _FEW_RANKS:
                return
            n_hosts, last = n_hosts + 1, hosts[rank]
        steps = list(algorithm.steps(rank, size, 0, hosts))
        left -= len(steps) + _STEPS_TO_BEGIN
        yield rank, steps


@functools.lru_cache(maxsize=64)
def _in_turn(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks: first those that tell whether ranks are alike, then host by host.

    Trees have most to do at hosts whose number is a multiple of a high power of two.
    """
    by_host = sorted(
        range(len(hosts)), key=lambda rank: (-(hosts[rank] & -hosts[rank]), hosts[rank])
    )
    size = len(hosts)
    telling = [0, size - 1, size // 2][:_N_TELLING]
    return tuple(dict.fromkeys([*telling, *_of_some_hosts(hosts), *by_host]))


@functools.lru_cache(maxsize=64)
def _of_some_hosts(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of the root's host, and of the fullest and the emptiest."""
    n_ranks = Counter(hosts)
    of = n_ranks.__getitem__
    some = {hosts[0], max(n_ranks, key=of), min(n_ranks, key=of)}
    return tuple(rank for rank, host in enumerate(hosts) if host in some)


def _by_host(works: Mapping[int, StepCounts], hosts: Sequence[int]) -> Iterator[StepCounts]:
    """Of all ranks of each host of which all were counted; of all hosts if there is no such.

    The root and the middle of a tree have more to do than others, and stand for nobody else.
    """
    n_ranks, counted = Counter(hosts), Counter(hosts[rank] for rank in works)
    whole = [host for host in counted if counted[host] == n_ranks[host]]
    for host in whole or counted:
        here = [rank for rank in works if hosts[rank] == host]
        special = [works[rank] for rank in here if rank in (0, len(hosts) // 2)]
        others = [works[rank] for rank in here if rank not in (0, len(hosts) // 2)]
        each = (n_ranks[host] - len(special)) / max(1, len(others))
        sums = (
            (sum(one), sum(more))
            for one, more in zip(_turned(special), _turned(others), strict=True)
        )
        yield StepCounts(*(one + each * more for one, more in sums))


def _turned(works: Sequence[StepCounts]) -> list[tuple[float, ...]]:
    """By what is counted, of each of them."""
    return list(zip(*works, strict=True)) if works else [()] * len(StepCounts._fields)
