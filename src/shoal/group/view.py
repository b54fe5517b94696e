"""Views: the ranks that are left of a group, and how the survivors agree on them.

A rank reports its lost ranks to every rank that it can reach, again after each change. It is done
when all ranks that it can reach have lost the same ranks and want the same number: they mean the
same view. No rank decides for others, and the order of reports does not matter, since a report only
grows (docs/decisions/0018).

Pure: no clock, no link. `shrink.py` sends the reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple


class View(NamedTuple):
    """One membership of a group.

    Args:
        number: 1 when the group was formed; higher in every later view.
        ranks: the members' ranks when the group was formed, ascending. The member `ranks[r]` has
            rank r in this view.
        lost: the other ranks of the group when it was formed.
    """

    number: int
    ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()


MOST_NUMBER: Final = 1 << 33
"""The highest view number; a report with a higher one is damaged."""

_NOBODY: Final[frozenset[int]] = frozenset()


class Report(NamedTuple):
    """A rank's report to the others. Every field only grows.

    Args:
        number: the lowest number of a view that the rank will enter.
        lost: the ranks that it cannot reach any more.
        out: the ranks to exclude although some ranks can reach them.
        gave_up: the lost ranks that were alive and reported this rank as lost.
    """

    number: int
    lost: frozenset[int] = _NOBODY
    out: frozenset[int] = _NOBODY
    gave_up: frozenset[int] = _NOBODY

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that will not be in any view that the reporting rank enters."""
        return self.lost | self.out

    def encode(self, size: int) -> bytes:
        """Return the report in `n_report_bytes(size)` bytes, for a group of this size."""
        sets = (self.lost, self.out, self.gave_up)
        parts = (
            sum(1 << rank for rank in part).to_bytes(_n_set_bytes(size), "big") for part in sets
        )
        return self.number.to_bytes(_N_NUMBER_BYTES, "big") + b"".join(parts)


_N_NUMBER_BYTES: Final = 8


def _n_set_bytes(size: int) -> int:
    return (size + 7) // 8


def n_report_bytes(size: int) -> int:
    """Return the length of a report in a group of this size."""
    return _N_NUMBER_BYTES + 3 * _n_set_bytes(size)


def decode(encoded: bytes | bytearray, size: int) -> Report:
    """Return the report that was encoded for this size; drops ranks that do not exist."""
    number, rest = int.from_bytes(encoded[:_N_NUMBER_BYTES], "big"), encoded[_N_NUMBER_BYTES:]
    n_bytes = _n_set_bytes(size)
    bits = (int.from_bytes(rest[at * n_bytes : (at + 1) * n_bytes], "big") for at in range(3))
    return Report(number, *(frozenset(r for r in range(size) if part >> r & 1) for part in bits))


class Agreement:
    """One rank's part in agreeing on a group's next view; one object serves all views in turn.

    The caller sends `own` to all `reachable` ranks after each change, and passes in the reports of
    the `awaited` ranks, until it `is_settled` or `is_out`. Reports of other ranks may wait. Ranks
    and size refer to the group as it was formed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.own = Report(number=1)
        self._reports: dict[int, Report] = {}

    def ask(self, number: int, out: Iterable[int] = ()) -> None:
        """Ask for a view of at least this number, without the ranks `out`."""
        number = max(number, self.own.number)
        self._grow(self.own._replace(number=number, out=self.own.out | frozenset(out)))

    def lose(self, peer: int, gave_up: bool = False) -> None:
        """Record that the link to `peer` is gone; `gave_up`: it reported this rank as lost."""
        gave = {peer} if gave_up else _NOBODY
        self._grow(self.own._replace(lost=self.own.lost | {peer}, gave_up=self.own.gave_up | gave))

    def receive(self, peer: int, report: Report) -> None:
        """Merge the report of `peer`."""
        if peer in self.own.gone:
            return
        self._reports[peer] = report
        number = max(self.own.number, report.number)
        self._grow(self.own._replace(number=number, out=self.own.out | report.out))

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that this rank counts as members of the view."""
        gone = self.own.gone
        return tuple(rank for rank in range(self.size) if rank not in gone)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self.own.gone))

    @property
    def reachable(self) -> tuple[int, ...]:
        """The ranks to send reports to, also excluded ranks, so that they stop."""
        away = self.own.lost | {self.rank}
        return tuple(rank for rank in range(self.size) if rank not in away)

    @property
    def is_out(self) -> bool:
        """True if the others go on without this rank."""
        return self.rank in self.own.out

    @property
    def left_out_by(self) -> tuple[int, ...]:
        """The ranks that reported this rank as excluded."""
        return tuple(peer for peer, report in self._reports.items() if self.rank in report.out)

    @property
    def is_settled(self) -> bool:
        """True if all members agree with this rank on the number of the view and the lost ranks."""
        return not self.is_out and self._all_agree()

    @property
    def awaited(self) -> tuple[int, ...]:
        """The members whose next report is needed: they disagree, or another member lost them."""
        named = self._named()
        return tuple(
            peer
            for peer in self.members
            if peer != self.rank and (peer in named or not self._agrees(peer))
        )

    @property
    def silent(self) -> tuple[int, ...]:
        """The members that have not asked for this view."""
        return tuple(
            peer
            for peer in self.members
            if peer != self.rank
            and (peer not in self._reports or self._reports[peer].number < self.own.number)
        )

    def _grow(self, own: Report) -> None:
        self.own = own
        while more := self._parted() or self._forsaken():
            self.own = self.own._replace(out=self.own.out | more)

    def _parted(self) -> frozenset[int]:
        """Return, of two reachable ranks that lost each other, the one given up, or the higher.

        NOT before both have reported the loss: a rank that only one has lost may be dead.
        """
        kept: set[int] = set()
        for rank in self.members:
            rivals = {other for other in kept if self._have_parted(rank, other)}
            if all(self._was_given_up(other, by=rank) for other in rivals):
                kept = kept - rivals | {rank}
        return frozenset(self.members) - kept

    def _was_given_up(self, rank: int, by: int) -> bool:
        reports = self._reports
        return by in reports[rank].gave_up and rank not in reports[by].gave_up

    def _have_parted(self, one: int, other: int) -> bool:
        of_one, of_other = self._reports.get(one), self._reports.get(other)
        return bool(of_one and of_other and other in of_one.lost and one in of_other.lost)

    def _forsaken(self) -> frozenset[int]:
        """Return the members that an excluded rank had declared lost, once all members agree.

        That rank was alive when it declared them lost, and may go on without them in another view.
        """
        if not self._all_agree():
            return _NOBODY
        reports, out = {**self._reports, self.rank: self.own}, self.own.out
        return frozenset(
            rank for rank in self.members if rank in reports and not reports[rank].gave_up <= out
        )

    def _all_agree(self) -> bool:
        return all(peer == self.rank or self._agrees(peer) for peer in self.members)

    def _agrees(self, peer: int) -> bool:
        report = self._reports.get(peer)
        return (
            report is not None and report.number == self.own.number and report.gone == self.own.gone
        )

    def _named(self) -> frozenset[int]:
        """Return the members that another member has lost and this rank has not."""
        members = self.members
        lost = (self._reports[peer].lost for peer in members if peer in self._reports)
        return frozenset().union(*lost) & frozenset(members)
