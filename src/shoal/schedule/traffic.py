"""The messages of one rank, and its work for them depending on which peers share its host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.schedule.steps import Copy, Recv, Send

if TYPE_CHECKING:
    from shoal.schedule.steps import Step


class StepCounts(NamedTuple):
    """The work of one rank, or of all ranks of a host; fractions if chunks differ in length."""

    intra: float = 0
    """Messages to and from ranks of the same host."""
    inter: float = 0
    """Messages to and from other hosts."""
    shared: float = 0
    """Chunks copied for ranks of the same host: once, however many of them read that value."""
    moved: float = 0
    """Chunks copied or folded otherwise, by every receive, copy, and send to another host."""
    sent: float = 0
    """Chunks sent to other hosts."""
    received: float = 0
    """Chunks received from other hosts."""
    before: float = 0
    """Chunks received before the rank first passes on received or folded data."""
    passed_on: float = 0
    """Chunks sent to other hosts that hold received or folded data."""


def sum_of(works: Iterable[tuple[StepCounts, int]]) -> StepCounts:
    """Sum the counts, each multiplied by its number."""
    times = ([n * what for what in work] for work, n in works)
    return StepCounts(*map(sum, zip(*times, strict=True)))


class Messages(NamedTuple):
    """Messages of one kind, to or from some peers."""

    peers: frozenset[int]
    n: int
    """The messages with each of them."""
    is_late: bool
    """True if sends hold received or folded data; for receives, if such a send precedes them."""
    is_one_value: bool = False
    """True if all peers are sent the same values."""


class Traffic(NamedTuple):
    """The messages of a rank."""

    sends: tuple[Messages, ...]
    receives: tuple[Messages, ...]
    n_copies: int

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Traffic:
        """Count the steps of a rank."""
        written = defaultdict[tuple[int, int], int](int)
        values = defaultdict[tuple[int, int, int], list[int]](list)
        receives = Counter[tuple[int, bool]]()
        n_copies, is_late = 0, False
        for step in steps:
            if type(step) is Send:  # several times as fast as isinstance
                place = step.buffer, step.chunk
                version = written[place]
                values[(*place, version)].append(step.peer)
                is_late = is_late or version > 0
            elif type(step) is Recv:
                receives[step.peer, is_late] += 1
                written[step.buffer, step.chunk] += 1
            elif type(step) is Copy:
                n_copies += 1
                written[step.into_buffer, step.into] += 1
        together = Counter((tuple(sorted(peers)), value[2] > 0) for value, peers in values.items())
        alone = Counter({(to[0], late): n for (to, late), n in together.items() if len(to) == 1})
        several = (
            Messages(frozenset(to), n, late, True) for (to, late), n in together.items() if to[1:]
        )
        return cls((*_by_kind(alone), *several), (*_by_kind(receives),), n_copies)

    @property
    def to(self) -> frozenset[int]:
        """The ranks that it sends to."""
        return frozenset(peer for one in self.sends for peer in one.peers)

    @property
    def source(self) -> frozenset[int]:
        """The ranks that it receives from."""
        return frozenset(peer for one in self.receives for peer in one.peers)

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that it exchanges messages with."""
        return self.to | self.source

    def work(self, mates: Collection[int]) -> StepCounts:
        """Return the work of a rank that shares its host with these peers."""
        intra = shared = n_received = 0
        sent, received = [0, 0], [0, 0]
        for peers, n, is_late, is_one_value in self.sends:
            near = _n_in(peers, mates)
            intra += n * near
            shared += n * min(near, 1) if is_one_value else n * near
            sent[is_late] += n * (len(peers) - near)
        for peers, n, is_late, _ in self.receives:
            n_received += n * len(peers)
            received[is_late] += n * (len(peers) - _n_in(peers, mates))
        return StepCounts(
            intra=intra + n_received - sum(received),
            inter=sum(sent) + sum(received),
            shared=shared,
            moved=n_received + self.n_copies + sum(sent),
            sent=sum(sent),
            received=sum(received),
            before=received[False],
            passed_on=sent[True],
        )


def _n_in(peers: Collection[int], mates: Iterable[int]) -> int:
    return sum(mate in peers for mate in mates)


def _by_kind(n_with: Mapping[tuple[int, bool], int]) -> Iterator[Messages]:
    """Group peers with equally many messages."""
    peers = defaultdict[tuple[int, bool], list[int]](list)
    for (peer, is_late), n in n_with.items():
        peers[n, is_late].append(peer)
    return (Messages(frozenset(those), n, is_late) for (n, is_late), those in peers.items())
