"""A view of the pool on a worker: its links, its calls, and their plans."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.engine import plan_for
from shoal.errors import PeerLost, ShoalError
from shoal.group.pool.announce import TAG, pack
from shoal.group.pool.ending import Standing
from shoal.group.pool.probe import UNKNOWN, part_of
from shoal.group.pool.served_call import ServedCall
from shoal.plan.channels import n_lanes
from shoal.plan.cluster import Nic, Nics
from shoal.plan.served import choose_with_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shoal.engine import Plan
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.pool import Pool
    from shoal.group.pool.rails import Kind, Posting, Rail
    from shoal.group.pool.view_mesh import PoolGroup
    from shoal.plan import Cluster
    from shoal.shapes import Shape

_LOG: Final = logging.getLogger("shoal")

# Kinds of calls that every server remembers: a server keeps the 1,024 used last, and is up to 256
# calls behind. A kind beyond this number is announced again.
_MOST_ANNOUNCED: Final = 512

# Calls that succeeded here and may be open on another worker when a server is lost. Workers are a
# round trip behind each other, and servers have at most 256 calls in flight.
_N_OVER: Final = 4096


class Parts(NamedTuple):
    """The plans of a kind of call in a view; None for a part without work.

    Args:
        shape: of the servers' part, or of the workers' if servers have none.
    """

    servers: Plan | None
    workers: Plan | None
    shape: Shape


class View:
    """The workers and some servers, in one mesh.

    Args:
        group: the workers and, after them, the servers.
        cluster, nics: the base of the plans; the same on every worker.
        rail: this worker's.

    Attributes:
        steps: by server, how far its measured rate is below a worker's (`probe.step_of`).
        shares: by server, its weight in the kind of call that was planned last.
        servers: in the order of their ranks, which begin at `n_workers`; on rank 0 as named in
            `SHOAL_SERVERS`, elsewhere as in the roster.
        begin, end: the numbers of its calls; `end` is None while the view goes on.
        is_settling: True while new calls wait for the workers to agree on the view's calls.
        left: after settling, the calls still to be made and mended; other calls have no servers.
        n_shared: the number of this worker's calls with a servers' part.
        calls: the calls that may not have ended, in their order.
    """

    def __init__(
        self,
        number: int,
        group: PoolGroup,
        servers: Sequence[Address],
        cluster: Cluster,
        nics: Nics,
        rail: Rail,
    ) -> None:
        self.number, self.group, self.servers = number, group, servers
        self.n_workers = group.size - len(servers)
        self.nics, self.steps = nics, b""
        self.shares: Sequence[int] = (0,) * len(servers)
        self.begin = 0
        self.end: int | None = None
        self.n_shared = 0
        self.is_settling = False
        self.left: frozenset[int] | None = None
        self.calls: deque[ServedCall] = deque()
        self._over: deque[int] = deque(maxlen=_N_OVER)  # numbers of calls that have succeeded
        self._cluster, self._rail = cluster, rail
        self._kinds: OrderedDict[Kind, Parts] = OrderedDict()

    @property
    def has_ended(self) -> bool:
        return self.group.has_ended

    @property
    def is_busy(self) -> bool:
        """True while a server has yet to end its part of a call."""
        return any(call.servers is not None and not call.servers.done() for call in [*self.calls])

    def culprit(self) -> tuple[Address, str] | None:
        """Return the server whose loss ended the group, with the reason as a verb phrase."""
        error = self.group.ended()
        if not isinstance(error, PeerLost) or error.rank < self.n_workers:
            return None
        why = error.reason.replace("is out: ", "is cut off: ", 1)
        return self.servers[error.rank - self.n_workers], why

    def is_idle(self, lowest_open: int) -> bool:
        """Return True if all its calls were made and ended; calls below `lowest_open` were made."""
        if self.end is None or lowest_open < self.end:
            return False
        return all(call.is_whole for call in list(self.calls))

    def parts(self, kind: Kind) -> Parts:
        """Return the plans of this kind, which the lowest worker announces to the servers."""
        found = self._kinds.get(kind)
        if found is not None:
            self._kinds.move_to_end(kind)
            return found
        found = self._made(kind)
        if self.group.rank == 0 and found.servers is not None:
            self._announce(found.shape)
        self._kinds[kind] = found
        if len(self._kinds) > _MOST_ANNOUNCED:
            self._kinds.popitem(last=False)
        return found

    def call(self, pool: Pool, posting: Posting) -> tuple[ServedCall, Parts]:
        """Return a new call, and its plans. The caller holds the pool's `changed`."""
        parts, calls = self.parts(posting.kind), self.calls
        while calls and (calls[0].is_fine or calls[0].outcome is not None):
            call_over = calls.popleft()
            if call_over.is_fine:
                self._over.append(call_over.number)
        call = ServedCall(pool, self, posting, parts.shape)
        call.is_mended = parts.servers is None  # there is no servers' part to wait for
        calls.append(call)
        return call, parts

    def takes(self, number: int) -> bool:
        """Return True if servers will have a part in this call, not made yet."""
        return self.left is None or number in self.left

    def standings(
        self, numbers: Iterable[int], can_make: Callable[[int], bool]
    ) -> Iterator[Standing]:
        """Yield each call's standing; `can_make`: True if this worker can still make a call."""
        made, over = {call.number: call for call in self.calls}, frozenset(self._over)
        for number in numbers:
            call = made.get(number)
            if call is not None:
                yield Standing.WHOLE if call.is_whole else Standing.OPEN
            elif number in over:
                yield Standing.WHOLE
            else:
                yield Standing.UNMADE if can_make(number) else Standing.OTHER

    def _made(self, kind: Kind) -> Parts:
        n_bytes, alone = kind.n_bytes * kind.n_pieces, kind.alone(self._rail)
        chosen = choose_with_servers(n_bytes, self._cluster, self.nics, kind.codec)
        if self.group.rank == 0:
            names = " and ".join(chosen.names) or alone.algorithm
            _LOG.info("view %d: all_reduce by %s: %s", self.number, names, chosen.why)
        if chosen.weights is None:
            return Parts(None, self._rail.plan(alone), alone)
        self.shares = chosen.weights.servers
        rank, cluster = self.group.rank, self.group.planner.cluster
        cut = n_lanes("all_reduce", kind.n_bytes, cluster, self.group.n_channels)
        shape = kind.shape(chosen.weights.name("servers"), rank, self.group.size, cut)
        workers = None
        if "workers" in chosen.weights.parts:
            own = kind.shape(chosen.weights.name("workers"), rank, self.n_workers, kind.n_lanes)
            workers = self._rail.plan(own)
        return Parts(plan_for(shape, self.n_workers), workers, shape)

    def _announce(self, shape: Shape) -> None:
        message = pack(shape)
        try:
            for rank in range(self.n_workers, self.group.size):
                self.group.send(bytearray(message), rank, TAG, async_op=True)
        except ShoalError:
            if not self.has_ended:  # else the workers mend the call
                raise


def nics_of(
    rates: Sequence[float], n_workers: int, cluster: Cluster, steps: Sequence[int] = ()
) -> Nics:
    """Return the NICs of a view; `rates`: each rank's bytes per microsecond, 0: unknown.

    `steps` has `probe.step_of` each server; empty without a probe.
    """
    known = 1 / cluster.wire.us_per_byte if cluster.wire.us_per_byte else 1e6
    measured = (*(0,) * n_workers, *(steps or (UNKNOWN,) * (len(rates) - n_workers)))
    used = [rate or known * part_of(step) for rate, step in zip(rates, measured, strict=True)]
    nics = [Nic(rate, rate) for rate in used]
    return Nics(tuple(nics[n_workers:]), tuple(nics[:n_workers]))
