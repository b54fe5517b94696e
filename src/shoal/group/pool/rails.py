"""Kinds of calls, and rails: if several workers share a host, each reduces a part of every call.

The workers of a host fold their parts of a buffer among themselves. Then each all-reduces its own
part with its rail, the workers of the same place on the other hosts, and with the servers. Finally
the workers of a host send each other the results. Pure, except `RailNumbers`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import DType, Op
from shoal.engine import plan_among, plan_for
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan import default_cluster
from shoal.schedule.stripes import LINE_BYTES, STRIPE_FLOOR_BYTES
from shoal.shapes import Shape, layouts_of

if TYPE_CHECKING:
    from shoal.codec import Codec
    from shoal.engine import Plan
    from shoal.group.numbers import Numbers
    from shoal.plan import Cluster

MOST_PIECES: Final = 4
"""The most pieces of a call. Hosts fold one piece while another is on the network."""

_PIECE_BYTES: Final = 1 << 20  # shorter pieces cost more messages than they save


class Stage(enum.IntEnum):
    """The stages of a piece, in their order."""

    FOLD = 0
    """The workers of each host fold their parts."""
    RAIL = 1
    """The workers along each rail, and servers, fold the sums of the hosts."""
    SHARE = 2
    """The workers of each host send each other the results."""


class RailPart(NamedTuple):
    """Consecutive elements of a call's buffer."""

    offset: int
    """Bytes."""
    n_elems: int


class Rail(NamedTuple):
    """The workers with the same place on each host, seen from one of them; places count from 0.

    Args:
        members: the group ranks of the rail's workers, by host.
        mates: the group ranks of this host's workers, by place.
        rank: this worker's rank in the group.
        size: the group's size.
    """

    members: tuple[int, ...]
    mates: tuple[int, ...]
    rank: int
    size: int

    @property
    def place(self) -> int:
        return self.mates.index(self.rank)

    @property
    def host(self) -> int:
        """This worker's rank along the rail."""
        return self.members.index(self.rank)

    @property
    def n_rails(self) -> int:
        """The number of rails, which is the number of workers on each host."""
        return len(self.mates)

    def cluster_of(self, cluster: Cluster) -> Cluster:
        """Return the cluster of the members, each with its share of its host's link."""
        if self.n_rails == 1:
            return cluster
        us_per_byte = cluster.wire.us_per_byte * self.n_rails
        wire = replace(cluster.wire, us_per_byte=us_per_byte)
        hosts = range(len(self.members))
        return default_cluster(hosts, n_cores=max(1, cluster.n_cores // self.n_rails), wire=wire)

    def key(self, number: int, stage: Stage) -> int:
        """Return the key of a call's stage in the group's mesh; for `RAIL` in views' meshes too."""
        # NOT a counted key for a piece: it may start long after later calls, see `Numbers`.
        # Servers' first words use the key of a fourth stage (view_mesh.py).
        return number if self.n_rails == 1 else FIRST_NAMED_KEY | number << 2 | stage

    def plan(self, shape: Shape) -> Plan:
        """Return the plan of an all-reduce along the rail, for the group's links."""
        if self.n_rails == 1:
            return plan_for(shape)
        return plan_among(shape, self.members, self.size, f"along rail {self.place}")

    def local(self, stage: Stage, dtype: DType, op: Op, n_elems: int) -> Plan:
        """Return the plan of a stage within a host."""
        shape = self._local_shape(dtype, op, n_elems)
        what = "folded in each host" if stage is Stage.FOLD else "sent in each host"
        return plan_among(shape, self.mates, self.size, what, stage is Stage.SHARE)

    def own(self, dtype: DType, n_elems: int) -> RailPart:
        """Return this worker's part of a piece, relative to the piece."""
        offsets, lengths = layouts_of(self._local_shape(dtype, Op.SUM, n_elems))[0]
        return RailPart(offsets[self.place], lengths[self.place] // dtype.n_bytes)

    def pieces(self, dtype: DType, n_elems: int) -> list[RailPart]:
        """Return the pieces of a call; empty if it is too short to be cut."""
        item = dtype.n_bytes
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
    """Return the rail of a worker; None if hosts differ in their numbers of workers.

    Args:
        hosts: the host of each rank of the group, numbered from 0.
    """
    by_host: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for other, host in enumerate(hosts):
        by_host[host].append(other)
    if len({len(ranks) for ranks in by_host}) > 1:
        return None
    mates = by_host[hosts[rank]]
    place = mates.index(rank)
    return Rail(tuple(ranks[place] for ranks in by_host), tuple(mates), rank, len(hosts))


class Kind(NamedTuple):
    """A kind of all-reduce: everything that its plans depend on.

    Args:
        n_lanes: the channels of the workers' group that it is cut over.
        pieces: its pieces along the rails, where several workers share a host.
        n_pieces: if this is a piece of a call, the number of that call's pieces.
    """

    dtype: DType
    op: Op
    n_elems: int
    codec: Codec
    n_lanes: int = 1
    pieces: tuple[RailPart, ...] = ()
    n_pieces: int = 1

    @property
    def n_bytes(self) -> int:
        return self.n_elems * self.dtype.n_bytes

    def shape(self, algorithm: str, rank: int, size: int, n_lanes: int) -> Shape:
        """Return the call's shape by this algorithm, among ranks on different hosts."""
        return Shape(
            *("all_reduce", algorithm, self.dtype, self.op, self.n_elems, rank, size),
            hosts=tuple(range(size)),
            codec=self.codec,
            rounds_own=self.codec.is_narrow,
            n_lanes=n_lanes,
        )

    def alone(self, rail: Rail) -> Shape:
        """Return the call's shape without servers; workers fold every element as servers do."""
        return self.shape("sharded", rail.host, len(rail.members), self.n_lanes)


class Posting(NamedTuple):
    """An all-reduce, or a piece of one, to start.

    Args:
        number: its number among all calls, or pieces, that may be served.
        address: of its memory.
        until: the deadline, by `time.monotonic`.
        subject: the call's purpose, on which ranks must agree.
    """

    kind: Kind
    number: int
    address: int
    until: float
    subject: int


class RailNumbers:
    """Numbers pieces from their call's number times `MOST_PIECES`; pieces start after it.

    Threads: the caller locks.
    """

    def __init__(self, calls: Numbers) -> None:
        self._calls = calls
        self._waiting: set[int] = set()

    def begin(self, call: int, n_pieces: int) -> range:
        """Return the numbers of a new call's pieces."""
        numbers = range(call * MOST_PIECES, call * MOST_PIECES + n_pieces)
        self._waiting.update(numbers)
        return numbers

    def left(self, number: int) -> None:
        """Record that a piece has started on its rail."""
        self._waiting.discard(number)

    def is_open(self, number: int) -> bool:
        """Return True if a piece can still start."""
        return number in self._waiting or self._calls.is_open(number // MOST_PIECES)

    def lowest_open(self) -> int:
        """Return the lowest number of a piece that can still start."""
        return min([self._calls.lowest_open() * MOST_PIECES, *self._waiting])
