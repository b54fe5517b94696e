"""Views: who is left of a group, and how the survivors come to agree on it.

A rank tells every other that it can reach whom it has lost, and tells them again when that changes.
It is done when all that it can reach have lost the same, want the same number, and so mean the same
view. No rank decides for others, nobody is asked about what only links know, and it does not matter
in which order words come: what a rank tells only grows (docs/decisions/0018).

Pure: no clock, no link. `shrink.py` brings the words to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple


class View(NamedTuple):
    """One membership of a group.

    Args:
        number: 1 when the group was formed, more in every later view.
        ranks: the ranks that its members had when the group was formed, ascending. The member
            `ranks[r]` has rank r in this view.
        lost: the other ranks that the group was formed with.
    """

    number: int
    ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()


_NOBODY: Final[frozenset[int]] = frozenset()


class Report(NamedTuple):
    """What a rank tells the others. Every part of it only grows.

    Args:
        number: of the view that it means to enter; at least.
        lost: whom it cannot reach any more.
        out: who is to be left out though some can reach them.
        gave_up: those among the lost who lived on, and said that they count it as lost.
    """

    number: int
    lost: frozenset[int] = _NOBODY
    out: frozenset[int] = _NOBODY
    gave_up: frozenset[int] = _NOBODY

    @property
    def gone(self) -> frozenset[int]:
        """Who is in no view that it enters."""
        return self.lost | self.out

    def encode(self, size: int) -> bytes:
        """As many bytes for every report of a group of this size: `n_report_bytes` of them."""
        sets = (self.lost, self.out, self.gave_up)
        parts = (
            sum(1 << rank for rank in part).to_bytes(_n_set_bytes(size), "big") for part in sets
        )
        return self.number.to_bytes(_N_NUMBER_BYTES, "big") + b"".join(parts)


_N_NUMBER_BYTES: Final = 8


def _n_set_bytes(size: int) -> int:
    return (size + 7) // 8


def n_report_bytes(size: int) -> int:
    """How long a report is in a group of this size."""
    return _N_NUMBER_BYTES + 3 * _n_set_bytes(size)


def decode(word: bytes | bytearray, size: int) -> Report:
    """The report that was encoded for this size. Ranks that there are not are passed over."""
    number, rest = int.from_bytes(word[:_N_NUMBER_BYTES], "big"), word[_N_NUMBER_BYTES:]
    n_bytes = _n_set_bytes(size)
    bits = (int.from_bytes(rest[at * n_bytes : (at + 1) * n_bytes], "big") for at in range(3))
    return Report(number, *(frozenset(r for r in range(size) if part >> r & 1) for part in bits))


class Agreement:
    """One rank's part in agreeing on the next view of a group; it serves all views in turn.

    Whoever drives it sends `own` to all `reachable` whenever it has changed, and brings what comes
    from those who are `awaited`, until it `is_settled` or `is_out`. What others say may lie until
    they are awaited.

    Args:
        rank: of this process, in the group as it was formed.
        size: of the group as it was formed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.own = Report(number=1)
        self._heard: dict[int, Report] = {}

    def ask(self, number: int, out: Iterable[int] = ()) -> None:
        """This rank wants a view of at least this number, without those in `out`."""
        number = max(number, self.own.number)
        self._grow(self.own._replace(number=number, out=self.own.out | frozenset(out)))

    def lose(self, peer: int, gave_up: bool = False) -> None:
        """The link with `peer` is gone. `gave_up`: the last word on it was that it gave us up."""
        gave = {peer} if gave_up else _NOBODY
        self._grow(self.own._replace(lost=self.own.lost | {peer}, gave_up=self.own.gave_up | gave))

    def hear(self, peer: int, report: Report) -> None:
        """`peer` has told this."""
        if peer in self.own.gone:
            return
        self._heard[peer] = report
        number = max(self.own.number, report.number)
        self._grow(self.own._replace(number=number, out=self.own.out | report.out))

    @property
    def members(self) -> tuple[int, ...]:
        """Who would be in the view, as far as this rank knows."""
        gone = self.own.gone
        return tuple(rank for rank in range(self.size) if rank not in gone)

    @property
    def missing(self) -> tuple[int, ...]:
        """Who would not."""
        return tuple(sorted(self.own.gone))

    @property
    def reachable(self) -> tuple[int, ...]:
        """To whom this rank talks: also to those who are to be left out, and have to know."""
        away = self.own.lost | {self.rank}
        return tuple(rank for rank in range(self.size) if rank not in away)

    @property
    def is_out(self) -> bool:
        """Whether the others go on without this rank."""
        return self.rank in self.own.out

    @property
    def left_out_by(self) -> tuple[int, ...]:
        """Who has told this rank that it is out."""
        return tuple(peer for peer, told in self._heard.items() if self.rank in told.out)

    @property
    def is_settled(self) -> bool:
        """Whether all members mean the view that this rank means."""
        return not self.is_out and not self._doubtful() and self._all_agree()

    @property
    def awaited(self) -> tuple[int, ...]:
        """The members who have yet to say something: that they agree, or what else."""
        named = self._named()
        return tuple(
            peer
            for peer in self.members
            if peer != self.rank and (peer in named or not self._agrees(peer))
        )

    @property
    def silent(self) -> tuple[int, ...]:
        """The members who have not asked for this view."""
        return tuple(
            peer
            for peer in self.members
            if peer != self.rank
            and (peer not in self._heard or self._heard[peer].number < self.own.number)
        )

    # What follows from what was told.

    def _grow(self, own: Report) -> None:
        self.own = own
        while more := self._parted() or self._forsaken():
            self.own = self.own._replace(out=self.own.out | more)

    def _parted(self) -> frozenset[int]:
        """Of two that have lost each other, and that we can reach, the one that was given up.

        If neither was, or both, the one of the higher rank. NOT before both have said that they
        lost the other: what only one has lost may be dead.
        """
        kept: set[int] = set()
        for rank in self.members:
            rivals = {other for other in kept if self._have_parted(rank, other)}
            if all(self._was_given_up(other, by=rank) for other in rivals):
                kept = kept - rivals | {rank}
        return frozenset(self.members) - kept

    def _was_given_up(self, rank: int, by: int) -> bool:
        heard = self._heard
        return by in heard[rank].gave_up and rank not in heard[by].gave_up

    def _have_parted(self, one: int, other: int) -> bool:
        heard = self._heard
        return (
            one in heard
            and other in heard
            and other in heard[one].lost
            and one in heard[other].lost
        )

    def _forsaken(self) -> frozenset[int]:
        """Once all mean the same view: who was given up by a rank that is not in it.

        That rank lived when it gave them up, and went on without them: in a view of its own, if
        nobody has said that it is out.
        """
        return self._doubtful() if self._all_agree() else _NOBODY

    def _doubtful(self) -> frozenset[int]:
        told = {**self._heard, self.rank: self.own}
        out = self.own.out
        return frozenset(
            rank for rank in self.members if rank in told and not told[rank].gave_up <= out
        )

    def _all_agree(self) -> bool:
        return all(peer == self.rank or self._agrees(peer) for peer in self.members)

    def _agrees(self, peer: int) -> bool:
        report = self._heard.get(peer)
        return (
            report is not None and report.number == self.own.number and report.gone == self.own.gone
        )

    def _named(self) -> frozenset[int]:
        """Who is lost to some member, and not to us."""
        members = self.members
        lost = (self._heard[peer].lost for peer in members if peer in self._heard)
        return frozenset().union(*lost) & frozenset(members)
