"""One view of the pool, as a worker uses it: the plans of its calls, and the calls themselves."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.engine import plan_for
from shoal.group.pool.announce import TAG, pack
from shoal.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.codec import Codec
    from shoal.dtypes import DType, Op
    from shoal.engine import Plan
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.meeting import PoolGroup
    from shoal.group.pool.pooled_call import PooledCall
    from shoal.schedule.weights import Weights

# Kinds of calls that a server is known to remember: it forgets the oldest that it has not used, of
# twice as many. One that has fallen out here is told again.
_MOST_ANNOUNCED: Final = 128


class Kind(NamedTuple):
    """A kind of call that servers take part in."""

    dtype: DType
    op: Op
    n_elems: int
    codec: Codec


class Parts(NamedTuple):
    """The plans of a call in one view, and its shape in the pool group."""

    servers: Plan
    workers: Plan | None
    shape: Shape


class PoolView:
    """One of them.

    Attributes:
        servers: in the order of their ranks, which begin at `n_workers`.
        begin, end: the numbers of its calls; no end: it goes on.
        calls: those that may not have ended, in their order.
    """

    def __init__(
        self, number: int, group: PoolGroup, servers: Sequence[Address], weights: Weights
    ) -> None:
        self.number, self.group, self.servers, self.weights = number, group, servers, weights
        self.n_workers = group.size - len(servers)
        self.begin = 0
        self.end: int | None = None
        self.calls: deque[PooledCall] = deque()
        self._keys = itertools.count(1)
        self._kinds: OrderedDict[Kind, Parts] = OrderedDict()

    @property
    def has_ended(self) -> bool:
        """Whether its group has."""
        return self.group.ended() is not None

    def is_idle(self, n_made: int) -> bool:
        """Whether all its calls were made, of which there are so many in all, and have ended."""
        if self.end is None or n_made < self.end:
            return False
        return all(call.is_whole for call in list(self.calls))

    def abort(self, why: str) -> None:
        """End its group on every rank of it; calls in flight fail."""
        self.group.abort(why)

    def parts(self, kind: Kind) -> Parts:
        """The plans of this kind, which the lowest worker makes known to the servers."""
        found = self._kinds.get(kind)
        if found is not None:
            self._kinds.move_to_end(kind)
            return found
        found = self._made(kind)
        if self.group.rank == 0:
            self._announce(found.shape)
        self._kinds[kind] = found
        if len(self._kinds) > _MOST_ANNOUNCED:
            self._kinds.popitem(last=False)
        return found

    def post(self, call: PooledCall, parts: Parts) -> None:
        """Start the servers' part, unless the group has ended."""
        key = next(self._keys)
        if not self.has_ended:
            call.servers = self.group.post(parts.servers, key, call.address)

    def add(self, call: PooledCall) -> None:
        """Remember a call that was made."""
        calls = self.calls
        while calls and (calls[0].is_fine or calls[0].outcome is not None):
            calls.popleft()
        calls.append(call)

    def _made(self, kind: Kind) -> Parts:
        n, size = self.n_workers, self.group.size

        def shape_of(part: str, ranks: int) -> Shape:
            return Shape(
                *("all_reduce", self.weights.name(part), kind.dtype, kind.op, kind.n_elems),
                *(self.group.rank, ranks),
                hosts=tuple(range(ranks)),
                codec=kind.codec,
            )

        shape = shape_of("servers", size)
        workers = shape_of("workers", n) if "workers" in self.weights.parts else None
        return Parts(plan_for(shape, n), None if workers is None else plan_for(workers), shape)

    def _announce(self, shape: Shape) -> None:
        message = pack(shape)
        for rank in range(self.n_workers, self.group.size):
            self.group.send(bytearray(message), rank, TAG, async_op=True)
