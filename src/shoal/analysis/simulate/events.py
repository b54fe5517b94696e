"""The clock of a simulation: the position of every segment over time.

Segments wait for four resources, each of them serving in order of request:

- a rank's core, for the message, the fold or the copy of one segment;
- the NIC out of a host, where the links of its ranks take turns, a segment each, as in TCP;
- the NIC into a host, first come, first served; other segments wait in the switch. It takes longer
  for the first MiB of a message if the sender has other messages and the receiver other senders;
- a grant of the receiver for large messages between hosts, as in the engine. A server grants all
  workers at once as many segments as its window holds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from shoal.analysis.simulate.windows import ServerWindows
from shoal.errors import ProofError
from shoal.limits import EAGER_BYTES, LOOK_AHEAD
from shoal.plan.cluster import CONTENDED_BYTES, SCRATCH_KEPT_BYTES
from shoal.schedule import Buffer, Recv, Send

if TYPE_CHECKING:
    from shoal.analysis.dataflow import Dataflow
    from shoal.plan.cluster import Cluster

_WORKED, _SENT, _ARRIVED, _GRANTED = range(4)


class EventSimulation:
    """One run of a schedule in time.

    Args:
        flow: the schedule. Its ranks may stand for many that are alike; peers keep their names.
        n_bytes: the length of each step's chunk.
        segment: the bytes of a segment.
        has_servers: True: ranks that receive only into scratch are servers.

    Cost: about 10 us for each segment of a message.
    """

    def __init__(
        self,
        flow: Dataflow,
        n_bytes: Sequence[int],
        cluster: Cluster,
        segment: int,
        has_servers: bool = False,
    ) -> None:
        self.order: list[int] = []
        """The steps in the order in which work on their first segment began."""
        self._flow, self._n_bytes, self._cluster, self._segment = flow, n_bytes, cluster, segment
        hosts = cluster.hosts
        self._n_segments = [-(-n // segment) for n in n_bytes]
        self._is_wire = [
            isinstance(step, Send) and hosts[rank] != hosts[step.peer]
            for step, rank in zip(flow.steps, flow.rank_of, strict=True)
        ]
        self._is_copied = self._find_copied()
        self._windows = ServerWindows(flow, self._n_segments) if has_servers else None
        self._is_fresh = self._find_fresh()
        n_steps = len(flow.steps)
        # The progress of each step, in segments.
        self._begun, self._done, self._arrived = [0] * n_steps, [0] * n_steps, [0] * n_steps
        self._granted, self._promised = list(self._n_segments), [0] * n_steps
        self._is_busy = bytearray(n_steps)
        self._gate: dict[int, int] = {}  # for a Send, the Recv that must be done before it
        self._gated: dict[int, int] = {}  # the inverse of `_gate`
        # The state of each rank, host or link.
        n_ranks_of = [0] * cluster.n_hosts
        for host in hosts:
            n_ranks_of[host] += 1
        self._slowdown = [max(1.0, n / cluster.n_cores) for n in n_ranks_of]
        self._core_free = [0.0] * flow.size
        rested = float("-inf")
        self._out_free, self._in_free = [rested] * cluster.n_hosts, [rested] * cluster.n_hosts
        self._n_contended = CONTENDED_BYTES // segment
        self._is_sending = bytearray(cluster.n_hosts)
        self._last_into = [-1] * cluster.n_hosts  # the host of the last segment into each
        self._turns: list[deque[tuple[int, int]]] = [deque() for _ in range(cluster.n_hosts)]
        self._queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._now = 0.0
        self._events: list[tuple[float, int, int]] = []

    def run(self) -> float:
        """Run all steps; return the last one's time in us. ProofError if some never end."""
        for step in range(len(self._flow.steps)):
            self._announce(step)
        if self._windows:
            self._let(self._windows.opened_first(self._done))
        for step in range(len(self._flow.steps)):
            self._attempt(step)
        events, n_segments = self._events, self._n_segments
        while events:
            self._now, step, what = heappop(events)
            if what == _WORKED:
                self._worked(step)
            elif what == _SENT:
                self._sent(step)
            elif what == _ARRIVED:
                self._arrived[step] += 1
                self._attempt(step)
            else:
                self._granted[step] = self._promised[self._flow.partner_of[step]]
                self._attempt(step)
        for step, done in enumerate(self._done):
            if done < n_segments[step]:
                raise ProofError(f"{self._flow.name(step)}: waits forever")
        return self._now

    def _find_copied(self) -> set[int]:
        """Return the Sends inside a host whose value an earlier Send has copied into a slot."""
        flow, first, copied = self._flow, dict[object, int](), set()
        for number, (step, rank) in enumerate(zip(flow.steps, flow.rank_of, strict=True)):
            if isinstance(step, Send) and not self._is_wire[number]:
                # A value is identified by its place and the steps that wrote it.
                value = (rank, step.buffer, step.chunk, tuple(flow.waits_for[number]))
                if first.setdefault(value, number) != number:
                    copied.add(number)
        return copied

    def _find_fresh(self) -> set[int]:
        """Return the first writes to scratch, on ranks whose scratch is new in every call."""
        flow, first = self._flow, dict[int, int]()
        for number, place in enumerate(flow.writes):
            if place >= 0 and flow.place(place).buffer is Buffer.SCRATCH:
                first.setdefault(place, number)
        n_bytes: defaultdict[int, int] = defaultdict(int)
        for number in first.values():
            n_bytes[flow.rank_of[number]] += self._n_bytes[number]
        for server in self._windows.servers if self._windows else ():  # servers keep their scratch
            n_bytes[server] = 0
        return {n for n in first.values() if n_bytes[flow.rank_of[n]] > SCRATCH_KEPT_BYTES}

    def _after(self, time: float, what: int, step: int) -> None:
        # Simultaneous events are ordered by step.
        heappush(self._events, (time, step, what))

    def _announce(self, recv: int) -> None:
        """Make a large message from another host wait for its receiver's grant."""
        flow, send = self._flow, self._flow.partner_of[recv]
        is_recv = isinstance(flow.steps[recv], Recv)
        if not is_recv or not self._is_wire[send] or self._n_bytes[recv] <= EAGER_BYTES:
            return
        waits = flow.waits_for[recv]
        if len(waits) == 1 and self._is_answer(recv, waits[0]):
            # No grant is needed: the sender knows the place is free when it gets our data from it.
            before = flow.partner_of[waits[0]]
            self._gate[send], self._gated[before] = before, send
            return
        self._granted[send] = 0
        if not waits and not self._is_windowed(recv):
            self._grant(recv)

    def _is_answer(self, recv: int, earlier: int) -> bool:
        """Return True if the step before a Recv is a Send to the same peer."""
        ours, theirs = self._flow.steps[earlier], self._flow.steps[recv]
        return isinstance(ours, Send) and isinstance(theirs, Recv) and ours.peer == theirs.peer

    def _grant(self, recv: int) -> None:
        """Grant the sender all ready segments, and some more for staging."""
        n_segments = self._n_segments[recv]
        ready = min((self._done[w] for w in self._flow.waits_for[recv]), default=n_segments)
        upto = min(n_segments, ready + LOOK_AHEAD)
        if upto > self._promised[recv] and (
            upto == n_segments or upto - self._promised[recv] >= LOOK_AHEAD // 2
        ):
            self._promise(recv, upto)

    def _promise(self, recv: int, upto: int) -> None:
        self._promised[recv] = upto
        latency = self._cluster.wire.latency_us
        self._after(self._now + latency, _GRANTED, self._flow.partner_of[recv])

    def _is_windowed(self, step: int) -> bool:
        return self._windows is not None and step in self._windows

    def _let(self, opened: Iterable[tuple[int, int]]) -> None:
        """Grant workers the segments that a server's window has room for."""
        for recv, upto in opened:
            if self._n_bytes[recv] > EAGER_BYTES:
                self._promise(recv, upto)

    def _attempt(self, step: int) -> None:
        """Work on the next segment of a step, unless it must wait."""
        segment = self._begun[step]
        if self._is_busy[step] or segment == self._n_segments[step]:
            return
        done = self._done
        for earlier in self._flow.waits_for[step]:
            if done[earlier] <= segment and done[earlier] < self._n_segments[earlier]:
                return
        doing = type(self._flow.steps[step])
        if doing is Recv and self._arrived[step] <= segment:
            return
        if doing is Send and (
            self._granted[step] <= segment
            or (step in self._gate and done[self._gate[step]] <= segment)
        ):
            return
        self._begun[step] = segment + 1
        self._is_busy[step] = 1
        rank = self._flow.rank_of[step]
        work = self._work(step, segment) * self._slowdown[self._cluster.hosts[rank]]
        self._core_free[rank] = max(self._now, self._core_free[rank]) + work
        self._after(self._core_free[rank], _WORKED, step)

    def _bytes_of(self, step: int, segment: int) -> int:
        return min(self._segment, self._n_bytes[step] - segment * self._segment)

    def _work(self, step: int, segment: int) -> float:
        """Return a segment's time on the core: the message, and a pass over its bytes.

        Copies by the kernel and through shared memory, folds and stores cost one pass at each end.
        Data that the kernel just wrote is in the cache when it is folded. Ranks of a host that
        receive the same data read one slot. New memory costs the kernel time.
        """
        cluster, partner = self._cluster, self._flow.partner_of[step]
        n_bytes = self._bytes_of(step, segment)
        passed = n_bytes * cluster.memory_us_per_byte
        if step in self._is_fresh:
            passed += n_bytes * cluster.fresh_us_per_byte
        if partner < 0:
            return passed
        if self._is_wire[step] or self._is_wire[partner]:
            return cluster.wire.message_us + passed + n_bytes * cluster.network_us_per_byte
        if step in self._is_copied:
            return cluster.local.message_us
        if type(self._flow.steps[step]) is Send:
            passed += n_bytes * cluster.local.us_per_byte
        return cluster.local.message_us + passed

    def _worked(self, step: int) -> None:
        """Send or complete a segment after the core's work."""
        self._is_busy[step] = 0
        if self._begun[step] == 1:
            self.order.append(step)
        if type(self._flow.steps[step]) is not Send:
            self._advance(step)
        elif self._is_wire[step]:
            self._queue(step)
            self._attempt(step)
        else:
            latency = self._cluster.local.latency_us
            self._after(self._now + latency, _ARRIVED, self._flow.partner_of[step])
            self._advance(step)

    def _queue(self, send: int) -> None:
        rank = self._flow.rank_of[send]
        host, link = self._cluster.hosts[rank], (rank, self._flow.steps[send].peer)  # type: ignore[union-attr]
        if not self._queues[link]:
            self._turns[host].append(link)
        self._queues[link].append(send)
        if not self._is_sending[host]:
            self._transmit(host)

    def _transmit(self, host: int) -> None:
        """Put the next segment on a host's NIC, taking links in turn."""
        self._is_sending[host] = bool(self._turns[host])
        if not self._turns[host]:
            return
        link = self._turns[host].popleft()
        send = self._queues[link].popleft()
        if self._queues[link]:
            self._turns[host].append(link)
        recv, wire = self._flow.partner_of[send], self._cluster.wire
        there = self._cluster.hosts[self._flow.rank_of[recv]]
        segment = self._done[send]
        n_bytes = self._bytes_of(send, segment)
        left = self._pass(self._out_free, host, self._now, n_bytes * wire.us_per_byte)
        takes = n_bytes * wire.us_per_byte
        head = self._now + wire.latency_us
        several = self._turns[host] and self._last_into[there] not in (-1, host)
        before = self._windows.before.get(send, 0) if self._windows else 0
        if several and before + segment < self._n_contended:
            takes *= 1 + self._cluster.contention
        self._last_into[there] = host
        arrived = max(left + wire.latency_us, self._pass(self._in_free, there, head, takes))
        self._after(left, _SENT, send)
        self._after(arrived, _ARRIVED, recv)

    def _pass(self, free: list[float], host: int, now: float, takes: float) -> float:
        """Return the time at which a segment that arrives at `now` has passed a NIC.

        An idle NIC lets `burst_bytes` pass at once: a token bucket.
        """
        burst = self._cluster.burst_bytes * self._cluster.wire.us_per_byte
        free[host] = max(free[host], now - burst) + takes
        return max(now, free[host])

    def _sent(self, send: int) -> None:
        host = self._cluster.hosts[self._flow.rank_of[send]]
        self._advance(send)
        self._transmit(host)

    def _advance(self, step: int) -> None:
        """Count a segment of this step as done, and try the steps that waited for it."""
        self._done[step] += 1
        if self._windows:
            self._let(self._windows.opened(step, self._done))
        for later in self._flow.waited_by[step]:
            if self._granted_by(later):
                self._grant(later)
            self._attempt(later)
        if step in self._gated:
            self._attempt(self._gated[step])
        self._attempt(step)

    def _granted_by(self, step: int) -> bool:
        """Return True if this is a Recv whose sender still waits for a grant."""
        if type(self._flow.steps[step]) is not Recv or self._is_windowed(step):
            return False
        return self._granted[self._flow.partner_of[step]] < self._n_segments[step]
