"""Rank 0 watches what calls take, and has shares corrected where servers carry other than reported.

`plan/measured.py` says what was seen, and what follows. Here is what it is told, and when it is
believed: a correction that brings nothing is taken back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal.dtypes import item_size
from shoal.plan.measured import TOLERATED, Seen, correct, late_servers, show_rates
from shoal.plan.text import counted
from shoal.schedule.weights import Weights, is_weighted, parse
from shoal.state.document import of_all_channels

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.pool_view import PoolView
    from shoal.group.pool.pooled_call import PooledCall
    from shoal.plan.cluster import Pool

# Of what is judged: less says more of single calls, and of what else the machines do.
_LEAST_CALLS: Final = 4
_LEAST_SAMPLES: Final = 8
_LEAST_US: Final = 1e6
RATE_FORMAT: Final = ".6g"
SAMPLE_S: Final = 0.1  # each is taken under the lock of the view's mesh
_SEGMENT_BYTES: Final = 1448  # that a TCP packet carries; as long waits are compared, any would do

_BETTER: Final = 0.97  # of a call's time: less is noise
_WORSE: Final = 1.05
_MOST_TRIES: Final = 4  # corrections in which no call gets faster
_REST_S: Final = 60.0  # until what brought nothing is tried again; twice as long each time
_LONGEST_REST_S: Final = 3600.0


@functools.lru_cache(maxsize=64)
def _weights_of(algorithm: str) -> Weights | None:
    """By which a call is shared; None: servers have no part in it."""
    return parse(algorithm)[0] if is_weighted(algorithm) else None


class _Sum:
    """Of calls by the same weights."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.n_bytes = self.workers_us = self.servers_us = 0.0


class Window(NamedTuple):
    """What some calls of a view took.

    Args:
        seen: of those by the weights that most went by; None: servers have no part.
        us_per_byte: of all of them.
        n_calls: there were.
    """

    seen: Seen | None
    us_per_byte: float
    n_calls: int


class Tally:
    """The calls of one view, on rank 0.

    Threads: any.
    """

    def __init__(self, n_workers: int, n_servers: int) -> None:
        self._lock = threading.Lock()
        self._n_workers, self._n_servers = n_workers, n_servers
        self._last_ns = [0, 0]  # when the last part of workers, and of servers, had ended
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[Weights | None, _Sum] = {}
        self._waiting = [0.0] * self._n_servers
        self._n_samples = 0
        self._took_us = self._n_bytes = 0.0

    def ended(self, call: PooledCall) -> None:
        """Count a call that has ended well."""
        with self._lock:
            self._count(call)

    def _count(self, call: PooledCall) -> None:
        weights = _weights_of(call.shape.algorithm)
        parts = call.workers, call.servers
        was_whole = weights is None or not call.is_mended
        last_ns = max(self._last_ns)
        times = [self._part_us(at, call, part) for at, part in enumerate(parts)]
        if not was_whole or not any(times):
            return
        sums = self._sums.setdefault(weights, _Sum())
        sums.n_calls += 1
        n_bytes = call.shape.n_elems * item_size(call.shape.dtype) * call.shape.codec.share
        sums.n_bytes += n_bytes
        sums.workers_us += times[0]
        sums.servers_us += times[1]
        self._n_bytes += n_bytes
        self._took_us += max(0, max(self._last_ns) - max(last_ns, call.began_ns)) / 1e3

    def _part_us(self, at: int, call: PooledCall, part: Any) -> float:
        """What a part took, from when the one before it had ended: they follow each other."""
        if part is None:
            return 0.0
        last_ns, ended_ns = self._last_ns[at], int(part.finished_ns)
        self._last_ns[at] = max(last_ns, ended_ns)
        return max(0, ended_ns - max(last_ns, call.began_ns)) / 1e3

    def sample(self, state: Mapping[str, Any]) -> None:
        """Count what waits for each server now: a mesh has told how it stands."""
        peers = [peer for peer in state["peers"] if peer["rank"] >= self._n_workers]
        with self._lock:
            for peer in peers:
                waits = peer["queued_bytes"]
                for socket in peer["sockets"]:
                    waits += socket["unsent_bytes"] + socket["n_unacked"] * _SEGMENT_BYTES
                self._waiting[peer["rank"] - self._n_workers] += waits
            self._n_samples += 1

    def take(self) -> Window | None:
        """What was counted since it was taken last; None: it is too little to say."""
        with self._lock:
            return self._take()

    def _take(self) -> Window | None:
        if not self._sums or self._took_us < _LEAST_US:
            return None
        weights, most = max(self._sums.items(), key=lambda item: item[1].n_bytes)
        n_samples = self._n_samples if weights is not None else _LEAST_SAMPLES
        if most.n_calls < _LEAST_CALLS or n_samples < _LEAST_SAMPLES:
            return None
        seen = self._seen(weights, most) if weights is not None else None
        n_calls = sum(each.n_calls for each in self._sums.values())
        window = Window(seen, self._took_us / self._n_bytes, n_calls)
        self._clear()
        return window

    def _seen(self, weights: Weights, sums: _Sum) -> Seen:
        shares = [weight / weights.total * sums.n_bytes for weight in weights.servers]
        delays = [
            waiting / self._n_samples * sums.servers_us / share if share else 0.0
            for waiting, share in zip(self._waiting, shares, strict=True)
        ]
        return Seen(weights, sums.n_bytes, sums.workers_us, sums.servers_us, tuple(delays))


class Correction:
    """What servers are taken to carry, where it is not what they report. Reads no clock."""

    def __init__(self) -> None:
        self._servers: dict[Address, tuple[bytes, float]] = {}
        self._known: set[tuple[Address, bytes]] = set()  # those that were late: it was measured
        self._among: Sequence[Address] = ()
        self._best: tuple[float, Pool] | None = None
        self._n_tries, self._not_before, self._rest_s = 0, 0.0, _REST_S
        self._suspects: dict[int, int] = {}  # by server: slower or faster, by the last window

    def rates(
        self, ready: Mapping[Address, bytes], servers: Sequence[Address]
    ) -> tuple[float, ...]:
        """Of each of these servers, in bytes each microsecond; 0: as it reports; none: all do.

        Args:
            ready: the identities of the servers' processes: another one is measured anew.
        """
        found = []
        for address in servers:
            identity, rate = self._servers.get(address, (b"", 0.0))
            found.append(rate if ready.get(address) == identity else 0.0)
        if not any(found):
            return ()
        # As the command that tells them writes them: all are to plan by the same numbers.
        return tuple(float(f"{rate:{RATE_FORMAT}}") for rate in found)

    def judge(
        self,
        window: Window,
        pool: Pool,
        ready: Mapping[Address, bytes],
        servers: Sequence[Address],
        now: float,
    ) -> Pool | None:
        """What servers carry by what was seen, if the next view is to be planned by that.

        Args:
            pool: what they were taken to carry in the view that was seen.
        """
        if list(servers) != list(self._among):
            self._among, self._best, self._n_tries = tuple(servers), None, 0
            self._suspects = {}
        own = [(address, ready.get(address, b"")) for address in servers]
        known = [at for at, one in enumerate(own) if one in self._known]
        found = self._judge(window, pool, known, now)
        if found is None:
            return None
        if window.seen is not None:
            self._known.update(own[at] for at in late_servers(pool, window.seen))
        for address, old, new in zip(servers, pool.servers, found.servers, strict=True):
            if new != old:
                self._servers[address] = ready.get(address, b""), new.slower
        return found

    def _judge(self, window: Window, pool: Pool, known: Collection[int], now: float) -> Pool | None:
        took = window.us_per_byte
        if self._best is None or took < _BETTER * self._best[0]:
            self._best, self._n_tries = (took, pool), 0
        found = correct(pool, window.seen, known) if window.seen is not None else None
        best_took, best = self._best
        suspects = _changed(pool, found) if found is not None else {}
        again = {which for which, sign in suspects.items() if self._suspects.get(which) == sign}
        self._suspects = suspects
        if now < self._not_before or (suspects and not again):
            return None
        if found is not None and self._n_tries < _MOST_TRIES:
            if not self._n_tries:  # by what links carry now: it may be less than they once did
                self._best = took, pool
            self._n_tries, self._suspects = self._n_tries + 1, {}
            return _only(again, pool, found)
        if self._n_tries:  # it has come to its end, one way or the other
            self._n_tries, self._best = 0, None
            is_worse = took > _WORSE * best_took
            if found is not None or is_worse:
                self._not_before = now + self._rest_s
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            if is_worse and best != pool:
                return best
        return None


def _changed(before: Pool, after: Pool) -> dict[int, int]:
    """By server, the sign of what changes by more than noise."""
    nics = zip(before.servers, after.servers, strict=True)
    ratios = (new.slower / old.slower for old, new in nics)
    return {
        server: 1 if ratio > 1 else -1
        for server, ratio in enumerate(ratios)
        if not 1 / TOLERATED <= ratio <= TOLERATED
    }


def _only(servers: Collection[int], before: Pool, after: Pool) -> Pool:
    """What changes of these."""
    nics = enumerate(zip(before.servers, after.servers, strict=True))
    found = tuple(new if server in servers else old for server, (old, new) in nics)
    return replace(before, servers=found)


class LinkWatch:
    """Looks at the calls of views as they go on.

    Threads: that of the pool, on rank 0.
    """

    def __init__(self) -> None:
        self._correction = Correction()
        self._next_at = 0.0
        self.rates = self._correction.rates

    def look(self, view: PoolView, ready: Mapping[Address, bytes], now: float) -> str:
        """Sample how its links stand, if it is time to, and judge once there is enough.

        Returns: which servers carry what, if the next view is to be planned by that.
        """
        mesh = view.group.mesh
        if now < self._next_at or mesh is None:
            return ""
        self._next_at = now + SAMPLE_S
        if any(call.servers is not None and not call.servers.done() for call in list(view.calls)):
            state = mesh.state(SAMPLE_S)
            if state is not None:
                view.tally.sample(of_all_channels(state))
        window = view.tally.take()
        if window is None:
            return ""
        found = self._correction.judge(window, view.nics, ready, view.servers, now)
        if found is None:
            return ""
        told = show_rates(view.servers, view.nics, found)
        return f"{told}, by {counted(window.n_calls, 'call')}"
