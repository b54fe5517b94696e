"""Rails: where several workers share a host, each has a part of every call to see to.

Workers of a host fold their parts of a buffer among themselves, then each all-reduces its own with
the workers of the same place on the other hosts, which servers may have a part in, and then they
tell each other the results. Those of one place are a rail. Pure, but for the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import DType, Op, item_size
from shoal.engine import plan_among, plan_for
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan import default_cluster
from shoal.schedule.stripes import LINE_BYTES, STRIPE_FLOOR_BYTES
from shoal.shapes import Shape, layouts_of

if TYPE_CHECKING:
    from shoal.engine import Plan
    from shoal.group.numbers import Numbers
    from shoal.plan import Cluster

MOST_PIECES: Final = 4
"""A call is cut into so many pieces at most, so that hosts fold one while another travels."""

_PIECE_BYTES: Final = 1 << 20  # shorter pieces cost more messages than they save


class Stage(enum.IntEnum):
    """What becomes of a piece, one after the other."""

    FOLD = 0
    """Within each host, everyone's part is folded."""
    RAIL = 1
    """Along each rail, the parts of hosts are."""
    TELL = 2
    """Within each host, everyone is told the results."""


class RailPart(NamedTuple):
    """Consecutive elements of a call's buffer."""

    offset: int
    """In bytes."""
    n_elems: int


class Rail(NamedTuple):
    """The workers of one place on each host, as one of them sees it; places count from 0.

    Args:
        members: ranks of the group, by host.
        mates: ranks of the group that are on this host, by place.
        rank: of this worker in the group.
        size: of the group.
    """

    members: tuple[int, ...]
    mates: tuple[int, ...]
    rank: int
    size: int

    @property
    def place(self) -> int:
        """Of this worker on its host."""
        return self.mates.index(self.rank)

    @property
    def host(self) -> int:
        """Of this worker among the members."""
        return self.members.index(self.rank)

    @property
    def n_rails(self) -> int:
        """As many as there are workers on each host."""
        return len(self.mates)

    def cluster_of(self, cluster: Cluster) -> Cluster:
        """The members, each with its part of what its host's link carries."""
        if self.n_rails == 1:
            return cluster
        us_per_byte = cluster.wire.us_per_byte * self.n_rails
        wire = replace(cluster.wire, us_per_byte=us_per_byte)
        hosts = range(len(self.members))
        return default_cluster(hosts, n_cores=max(1, cluster.n_cores // self.n_rails), wire=wire)

    def key(self, number: int, stage: Stage) -> int:
        """The key of a call's stage, in the group's mesh; of `RAIL` in a view's mesh too."""
        return number if self.n_rails == 1 else _key_of(number, stage)

    def plan(self, shape: Shape) -> Plan:
        """The plan of an all-reduce along the rail, for the group's links."""
        if self.n_rails == 1:
            return plan_for(shape)
        return plan_among(shape, self.members, self.size, f"along rail {self.place}")

    def local(self, stage: Stage, dtype: DType, op: Op, n_elems: int) -> Plan:
        """The plan of what is done to a piece within a host."""
        shape = self._local_shape(dtype, op, n_elems)
        what = "folded in each host" if stage is Stage.FOLD else "told in each host"
        return plan_among(shape, self.mates, self.size, what, stage is Stage.TELL)

    def own(self, dtype: DType, n_elems: int) -> RailPart:
        """This worker's part of a piece, relative to it."""
        offsets, lengths = layouts_of(self._local_shape(dtype, Op.SUM, n_elems))[0]
        return RailPart(offsets[self.place], lengths[self.place] // item_size(dtype))

    def pieces(self, dtype: DType, n_elems: int) -> list[RailPart]:
        """Return how a call is cut; none: it is too short for that."""
        item = item_size(dtype)
        n_bytes, least = n_elems * item, self.n_rails * STRIPE_FLOOR_BYTES
        if n_bytes < least:
            return []
        n = max(1, min(MOST_PIECES, n_bytes // max(_PIECE_BYTES, 2 * least)))
        line = LINE_BYTES // item
        length = -(-n_elems // (n * line)) * line
        begins = range(0, n_elems, length)
        return [RailPart(begin * item, min(length, n_elems - begin)) for begin in begins]

    def _local_shape(self, dtype: DType, op: Op, n_elems: int) -> Shape:
        place, n = self.place, self.n_rails
        return Shape("all_reduce", "sharded", dtype, op, n_elems, place, n, hosts=(0,) * n)


def rail_of(hosts: Sequence[int], rank: int) -> Rail | None:
    """That of a worker; None where hosts have unlike numbers of workers.

    Args:
        hosts: of every rank of the group, numbered from 0.
    """
    by_host: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for other, host in enumerate(hosts):
        by_host[host].append(other)
    if len({len(ranks) for ranks in by_host}) > 1:
        return None
    mates = by_host[hosts[rank]]
    place = mates.index(rank)
    return Rail(tuple(ranks[place] for ranks in by_host), tuple(mates), rank, len(hosts))


def _key_of(number: int, stage: Stage) -> int:
    # NOT one that counts: it may leave long after later calls, see `Numbers`. What would be a
    # fourth stage is a server's first word (meeting.py).
    return FIRST_NAMED_KEY | number << 2 | stage


class RailNumbers:
    """The numbers of pieces: those of calls, by the most pieces that a call has.

    A piece leaves for its rail some time after its call was made.

    Threads: the caller locks.
    """

    def __init__(self, calls: Numbers) -> None:
        self._calls = calls
        self._coming: set[int] = set()

    def begin(self, call: int, n_pieces: int) -> range:
        """Those of a call that is made now."""
        numbers = range(call * MOST_PIECES, call * MOST_PIECES + n_pieces)
        self._coming.update(numbers)
        return numbers

    def left(self, number: int) -> None:
        """This one has left."""
        self._coming.discard(number)

    def is_open(self, number: int) -> bool:
        """Whether it may yet leave."""
        return number in self._coming or self._calls.is_open(number // MOST_PIECES)

    def lowest_open(self) -> int:
        """The lowest that may yet leave."""
        return min([self._calls.lowest_open() * MOST_PIECES, *self._coming])
