"""One view of the pool, as a worker uses it: the plans of its calls, and the calls themselves."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import item_size
from shoal.engine import plan_for
from shoal.group.pool.announce import TAG, pack
from shoal.plan import choose_with_servers
from shoal.plan.cluster import Nic, Pool
from shoal.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.codec import Codec
    from shoal.dtypes import DType, Op
    from shoal.engine import Plan
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.meeting import PoolGroup
    from shoal.group.pool.pooled_call import PooledCall
    from shoal.plan import Cluster
    from shoal.schedule.weights import Weights

_LOG: Final = logging.getLogger("shoal")

# Kinds of calls that a server is known to remember: it forgets the oldest that it has not used, of
# 1,024. One that has fallen out here is told again.
_MOST_ANNOUNCED: Final = 128


class Kind(NamedTuple):
    """A kind of call that servers may take part in."""

    dtype: DType
    op: Op
    n_elems: int
    codec: Codec

    @property
    def n_bytes(self) -> int:
        """Of the buffer."""
        return self.n_elems * item_size(self.dtype)


class Parts(NamedTuple):
    """The plans of a kind of call in one view; of a part that there is not, none.

    Args:
        shape: of the servers' part; where there is none, of the workers'.
    """

    servers: Plan | None
    workers: Plan | None
    shape: Shape


class PoolView:
    """One of them.

    Args:
        group: of the workers and, after them, the servers.
        cluster, nics: what is chosen by; the same on every worker.

    Attributes:
        servers: in the order of their ranks, which begin at `n_workers`.
        begin, end: the numbers of its calls; no end: it goes on.
        n_shared: calls that servers have had a part in, here.
        calls: those that may not have ended, in their order.
    """

    def __init__(
        self,
        number: int,
        group: PoolGroup,
        servers: Sequence[Address],
        cluster: Cluster,
        nics: Pool,
    ) -> None:
        self.number, self.group, self.servers = number, group, servers
        self.n_workers = group.size - len(servers)
        self.begin = 0
        self.end: int | None = None
        self.n_shared = 0
        self.calls: deque[PooledCall] = deque()
        self._cluster, self._nics = cluster, nics
        self._keys = itertools.count(1)
        self._kinds: OrderedDict[Kind, Parts] = OrderedDict()

    @property
    def has_ended(self) -> bool:
        """Whether its group has."""
        return self.group.native_id is None or self.group.ended() is not None

    def is_idle(self, n_made: int) -> bool:
        """Whether all its calls were made, of which there are so many in all, and have ended."""
        if self.end is None or n_made < self.end:
            return False
        return all(call.is_whole for call in list(self.calls))

    def abort(self, why: str) -> None:
        """End its group on every rank of it; calls in flight fail."""
        self.group.abort(why)

    def parts(self, kind: Kind, alone: Shape) -> Parts:
        """The plans of this kind, which the lowest worker makes known to the servers.

        Args:
            alone: the call as the workers make it where servers would gain nothing.
        """
        found = self._kinds.get(kind)
        if found is not None:
            self._kinds.move_to_end(kind)
            return found
        found = self._made(kind, alone)
        if self.group.rank == 0 and found.servers is not None:
            self._announce(found.shape)
        self._kinds[kind] = found
        if len(self._kinds) > _MOST_ANNOUNCED:
            self._kinds.popitem(last=False)
        return found

    def post(self, call: PooledCall, parts: Parts) -> None:
        """Start the servers' part, unless the group has ended."""
        if parts.servers is None:
            call.is_mended = True  # nothing is left to be done
            return
        key = next(self._keys)
        if not self.has_ended:
            self.n_shared += 1
            call.servers = self.group.post(parts.servers, key, call.address)

    def add(self, call: PooledCall) -> None:
        """Remember a call that was made."""
        calls = self.calls
        while calls and (calls[0].is_fine or calls[0].outcome is not None):
            calls.popleft()
        calls.append(call)

    def _made(self, kind: Kind, alone: Shape) -> Parts:
        chosen = choose_with_servers(kind.n_bytes, self._cluster, self._nics, kind.codec)
        if self.group.rank == 0:
            names = " and ".join(chosen.names) or alone.algorithm
            _LOG.info("view %d: all_reduce by %s, since %s", self.number, names, chosen.why)
        if chosen.weights is None:
            return Parts(None, plan_for(alone), alone)
        shape = self._shape(kind, chosen.weights, "servers", self.group.size)
        workers = None
        if "workers" in chosen.weights.parts:
            workers = plan_for(self._shape(kind, chosen.weights, "workers", self.n_workers))
        return Parts(plan_for(shape, self.n_workers), workers, shape)

    def _shape(self, kind: Kind, weights: Weights, part: str, size: int) -> Shape:
        return Shape(
            *("all_reduce", weights.name(part), kind.dtype, kind.op, kind.n_elems),
            *(self.group.rank, size),
            hosts=tuple(range(size)),
            codec=kind.codec,
        )

    def _announce(self, shape: Shape) -> None:
        message = pack(shape)
        for rank in range(self.n_workers, self.group.size):
            self.group.send(bytearray(message), rank, TAG, async_op=True)


def nics_of(rates: Sequence[float], n_workers: int, cluster: Cluster) -> Pool:
    """What the links of a view carry, as its ranks have said; that of the cluster if unknown.

    Args:
        rates: by rank, bytes each microsecond; 0: unknown.
    """
    known = 1 / cluster.wire.us_per_byte if cluster.wire.us_per_byte else 1e6
    nics = [Nic(rate or known, rate or known) for rate in rates]
    return Pool(tuple(nics[n_workers:]), tuple(nics[:n_workers]))
