"""One view of the pool, as a worker uses it: the plans of its calls, and the calls themselves."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import Codec
from shoal.dtypes import item_size
from shoal.engine import plan_for
from shoal.errors import PeerLost, ShoalError
from shoal.group.pool.announce import TAG, pack
from shoal.group.pool.probe import UNKNOWN, part_of
from shoal.group.pool.settling import Standing
from shoal.plan import choose_with_servers
from shoal.plan.channels import n_lanes
from shoal.plan.cluster import Nic, Pool
from shoal.plan.text import show_bytes
from shoal.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shoal.dtypes import DType, Op
    from shoal.engine import Plan
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.meeting import PoolGroup
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.served_call import ServedCall
    from shoal.plan import Cluster
    from shoal.schedule.weights import Weights

_LOG: Final = logging.getLogger("shoal")

# Kinds of calls that a server is known to remember: it forgets the one that it has not used for
# longest, of 1,024, and is up to 256 calls behind. One that has fallen out here is told again.
_MOST_ANNOUNCED: Final = 512

# Calls that have ended well here, of which another worker may not know that when a server is lost.
# They are a round trip behind each other, and servers have 256 calls in flight at most.
_N_OVER: Final = 4096


class Kind(NamedTuple):
    """A kind of call that servers may take part in.

    Args:
        n_pieces: that follow one another, of which it is one.
    """

    dtype: DType
    op: Op
    n_elems: int
    codec: Codec
    n_pieces: int = 1

    def __str__(self) -> str:
        codec = "" if self.codec is Codec.IDENTITY else f" in {self.codec}"
        return f"all_reduce of {show_bytes(self.n_bytes)} {self.dtype}{codec}, {self.op}"

    @property
    def is_narrow(self) -> bool:
        """Whether elements are rounded to travel."""
        return self.codec is not Codec.IDENTITY

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


class View:
    """One of them.

    Args:
        group: of the workers and, after them, the servers.
        cluster, nics: what is chosen by; the same on every worker.
        rail: of this worker, which its group is of.
        note: hears how each kind of call is made, and why.

    Attributes:
        shares: by server, its weight in the kind of call that was planned last.
        servers: in the order of their ranks, which begin at `n_workers`.
        begin, end: the numbers of its calls; no end: it goes on.
        is_settling: its calls that nobody has made wait until that is agreed.
        left: once that is, those that are still to be made and mended; others are not its any more.
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
        rail: Rail,
        note: Callable[[int, str, str], None] = lambda _view, _kind, _how: None,
    ) -> None:
        self.number, self.group, self.servers = number, group, servers
        self.n_workers = group.size - len(servers)
        self.nics = nics
        self.shares: Sequence[int] = (0,) * len(servers)
        self.begin = 0
        self.end: int | None = None
        self.n_shared = 0
        self.is_settling = False
        self.left: frozenset[int] | None = None
        self.calls: deque[ServedCall] = deque()
        self._over: deque[int] = deque(maxlen=_N_OVER)  # the last that have ended well
        self._cluster, self._rail, self._note = cluster, rail, note
        self._kinds: OrderedDict[Kind, Parts] = OrderedDict()

    @property
    def has_ended(self) -> bool:
        """Whether its group has."""
        return self.group.native_id is None or self.group.ended() is not None

    @property
    def is_busy(self) -> bool:
        """True while a server has yet to end its part of a call."""
        return any(call.servers is not None and not call.servers.done() for call in [*self.calls])

    def culprit(self) -> tuple[Address, str] | None:
        """The server that its group has ended by, if any, and how, as a verb phrase."""
        error = self.group.ended()
        if not isinstance(error, PeerLost) or error.rank < self.n_workers:
            return None
        why = error.reason.replace("is out: ", "is cut off: ", 1)
        return self.servers[error.rank - self.n_workers], why

    def is_idle(self, lowest_open: int) -> bool:
        """Whether all its calls were made, the lowest that was not being this one, and ended."""
        if self.end is None or lowest_open < self.end:
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

    def post(self, call: ServedCall, parts: Parts) -> None:
        """Start the servers' part, unless the group has ended."""
        if parts.servers is None:
            call.is_mended = True  # nothing is left to be done
            return
        if not self.has_ended:
            self.n_shared += 1
            call.servers = self.group.post(
                parts.servers, self._rail.key_in_view(call.number), call.address, call.subject
            )

    def add(self, call: ServedCall) -> None:
        """Remember a call that was made."""
        calls = self.calls
        while calls and (calls[0].is_fine or calls[0].outcome is not None):
            call_over = calls.popleft()
            if call_over.is_fine:
                self._over.append(call_over.number)
        calls.append(call)

    def takes(self, number: int) -> bool:
        """Whether this call, which has not been made yet, is one of its own."""
        return self.left is None or number in self.left

    def standings(
        self, numbers: Iterable[int], may_come: Callable[[int], bool]
    ) -> Iterator[Standing]:
        """How these of its calls stand here.

        Args:
            may_come: whether a call may yet be made.
        """
        made, over = {call.number: call for call in self.calls}, frozenset(self._over)
        for number in numbers:
            call = made.get(number)
            if call is not None:
                yield Standing.WHOLE if call.is_whole else Standing.OPEN
            elif number in over:
                yield Standing.WHOLE
            else:
                yield Standing.UNMADE if may_come(number) else Standing.OTHER

    def _made(self, kind: Kind, alone: Shape) -> Parts:
        n_bytes = kind.n_bytes * kind.n_pieces
        chosen = choose_with_servers(n_bytes, self._cluster, self.nics, kind.codec)
        if self.group.rank == 0:
            names = " and ".join(chosen.names) or alone.algorithm
            _LOG.info("view %d: all_reduce by %s: %s", self.number, names, chosen.why)
            self._note(self.number, str(kind), f"{names}: {chosen.why}")
        if chosen.weights is None:
            return Parts(None, self._rail.plan(alone), alone)
        self.shares = chosen.weights.servers
        shape = self._shape(kind, chosen.weights, "servers", self.group.size, self._cut(kind))
        workers = None
        if "workers" in chosen.weights.parts:
            own = (self.n_workers, alone.n_lanes)
            workers = self._rail.plan(self._shape(kind, chosen.weights, "workers", *own))
        return Parts(plan_for(shape, self.n_workers), workers, shape)

    def _shape(self, kind: Kind, weights: Weights, part: str, size: int, cut: int) -> Shape:
        return Shape(
            *("all_reduce", weights.name(part), kind.dtype, kind.op, kind.n_elems),
            *(self.group.rank, size),
            hosts=tuple(range(size)),
            codec=kind.codec,
            rounds_own=kind.is_narrow,
            n_lanes=cut,
        )

    def _cut(self, kind: Kind) -> int:
        """Over how many channels of its mesh."""
        cluster, n_channels = self.group.planner.cluster, self.group.n_channels
        return n_lanes("all_reduce", kind.n_bytes, cluster, n_channels)

    def _announce(self, shape: Shape) -> None:
        message = pack(shape)
        try:
            for rank in range(self.n_workers, self.group.size):
                self.group.send(bytearray(message), rank, TAG, async_op=True)
        except ShoalError:
            if not self.has_ended:  # else nobody needs to hear of it: the call is mended
                raise


def nics_of(
    rates: Sequence[float], n_workers: int, cluster: Cluster, steps: Sequence[int] = ()
) -> Pool:
    """Return what the links of a view carry, from what its ranks report.

    Args:
        rates: by rank, bytes each microsecond; 0: unknown, which counts as the cluster's.
        steps: of each server, how far below a worker's its rate was measured to be, for those of
            unknown rate (`probe.step_of`); none: nothing was measured.
    """
    known = 1 / cluster.wire.us_per_byte if cluster.wire.us_per_byte else 1e6
    measured = (*(0,) * n_workers, *(steps or (UNKNOWN,) * (len(rates) - n_workers)))
    used = [rate or known * part_of(step) for rate, step in zip(rates, measured, strict=True)]
    nics = [Nic(rate, rate) for rate in used]
    return Pool(tuple(nics[n_workers:]), tuple(nics[:n_workers]))
