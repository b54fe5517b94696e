"""The messages of one rank, and what they are to it on some hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.schedule.steps import Buffer, Copy, Recv, Send

if TYPE_CHECKING:
    from shoal.schedule.steps import Step


class StepCounts(NamedTuple):
    """What one rank has to do, or all ranks of a host."""

    intra: int = 0
    """Messages to and from ranks of the same host."""
    inter: int = 0
    """Messages to and from other hosts."""
    shared: int = 0
    """Chunks copied for ranks of the same host: once, however many of them read that value."""
    moved: int = 0
    """Chunks copied or folded otherwise: of every receive, copy, and send to another host."""
    sent: int = 0
    """Chunks sent to other hosts."""
    received: int = 0
    """Chunks received from other hosts."""
    before: int = 0
    """Of these, those received before anything that was received or folded is passed on."""
    passed_on: int = 0
    """Of the chunks sent to other hosts, those that are so passed on."""


def sum_of(works: Iterable[tuple[StepCounts, int]]) -> StepCounts:
    """All of them, each as often as is said beside it."""
    times = ([n * what for what in work] for work, n in works)
    return StepCounts(*map(sum, zip(*times, strict=True)))


class Counted(NamedTuple):
    """What all ranks of a group do."""

    ranks: Iterable[StepCounts]
    """Of each rank, at least once."""
    hosts: Iterable[StepCounts]
    """Of all ranks of each host, at least once."""
    n_scratch: int
    """Chunks of the rank that has most."""
    n_peers: int
    """With how many other hosts one exchanges at most."""


class Messages(NamedTuple):
    """Messages of one kind, to or from some peers."""

    peers: frozenset[int]
    n: int
    """With each of them."""
    is_late: bool
    """Whether what is sent was received or folded; whether something such was sent before."""
    is_one_value: bool = False
    """Whether all are sent the same values, and not each its own."""


class Traffic(NamedTuple):
    """The messages of a rank."""

    sends: tuple[Messages, ...]
    receives: tuple[Messages, ...]
    n_copies: int
    finishes: tuple[tuple[bool, int], ...]
    """How many chunks it finishes before and after it has passed something on."""

    @classmethod
    def of(cls, steps: Iterable[Step], *, is_written: bool = False) -> Traffic:
        """Count the steps of a rank; `is_written`: its data was folded before they begin."""
        written: Counter[tuple[int, int]] = Counter()
        values = defaultdict[tuple[int, int, int], list[int]](list)
        receives, finishes = Counter[tuple[int, bool]](), Counter[bool]()
        n_copies, is_late = 0, False
        for step in steps:
            if isinstance(step, Send):
                place = step.buffer, step.chunk
                version = written[place] + (is_written and step.buffer is Buffer.DATA)
                values[(*place, version)].append(step.peer)
                is_late = is_late or version > 0
            elif isinstance(step, Recv):
                receives[step.peer, is_late] += 1
                written[step.buffer, step.chunk] += 1
            elif isinstance(step, Copy):
                n_copies += 1
                written[step.into_buffer, step.into] += 1
            else:
                finishes[is_late] += 1
        together = Counter((tuple(sorted(peers)), value[2] > 0) for value, peers in values.items())
        alone = Counter({(to[0], late): n for (to, late), n in together.items() if len(to) == 1})
        several = (
            Messages(frozenset(to), n, late, True) for (to, late), n in together.items() if to[1:]
        )
        return cls(
            (*_by_kind(alone), *several),
            (*_by_kind(receives),),
            n_copies,
            tuple(sorted(finishes.items())),
        )

    def renamed(self, rename: Callable[[int], int]) -> tuple[object, ...]:
        """The same with other peers, to be compared with others."""
        sends, receives = (
            Counter(one._replace(peers=frozenset(map(rename, one.peers))) for one in of)
            for of in (self.sends, self.receives)
        )
        return sends, receives, self.n_copies, self.finishes

    @property
    def to(self) -> frozenset[int]:
        """All that it sends to."""
        return frozenset(peer for one in self.sends for peer in one.peers)

    @property
    def source(self) -> frozenset[int]:
        """All that it receives from."""
        return frozenset(peer for one in self.receives for peer in one.peers)

    def work(self, mates: Collection[int]) -> StepCounts:
        """What that is for a rank that shares its host with some of the peers."""
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
    """Peers with which there are as many messages, together."""
    peers = defaultdict[tuple[int, bool], list[int]](list)
    for (peer, is_late), n in n_with.items():
        peers[n, is_late].append(peer)
    return (Messages(frozenset(those), n, is_late) for (n, is_late), those in peers.items())
