"""What a benchmark of servers measures: beside the optimum, the line, and what servers spend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal.bench.job import Failure
from shoal.bench.limits import STREAM_BYTES
from shoal.lab import Flow, measure_streams
from shoal.plan.cluster import Nic
from shoal.plan.shares import best_shares

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools

_GIGABYTE: Final = 1e9
# Of the bytes of a tensor: less on a server's NIC is what servers and workers tell each other.
_TALK: Final = 0.02


def one_stream(pools: WorkerPools, case: Case) -> float:
    """Bytes per second of one raw TCP stream between two workers; over each of their NICs, all."""
    n_nics = 1 + len(case.more_mbit)
    flows = [Flow(0, 1, nic) for nic in range(n_nics)]
    return sum(measure_streams(pools.cluster(case), flows, STREAM_BYTES // n_nics))


def optimum(pools: WorkerPools, case: Case) -> float:
    """Seconds of the linear program's best shares, at the rate of one raw stream of this run.

    With as many servers as workers that is the time in which the stream carries the tensor.
    """
    rate = one_stream(pools, case) / 1e6
    alike = case.rate_mbit
    assert alike is not None  # such rows have a rate
    rates = case.server_mbit or (alike,)
    parts = [rates[index % len(rates)] / alike for index in range(case.n_servers)]
    worker = Nic(rate, rate)
    servers = [Nic(rate * part, rate * part) for part in parts]
    return best_shares([worker] * case.n_ranks, servers).us_per_byte * case.n_bytes / 1e6


def incast_line(pools: WorkerPools, case: Case) -> float:
    """Seconds in which all workers' tensors pass the servers' NICs, at one raw stream's rate."""
    return case.n_ranks * case.n_bytes / case.n_servers / one_stream(pools, case)


class ServedCalls:
    """Calls of one library with servers, and whether these had a part in them."""

    def __init__(self, library: str, *, must_be: bool = False) -> None:
        self._library, self._must_be = library, must_be
        self._is_used = 0.0

    def time(self, pools: WorkerPools, case: Case) -> float:
        """Seconds of a call, of the slowest rank; the median over the samples of a round.

        Raises:
            Failure: servers had no part in them, and must have.
        """
        self._is_used = 0.0
        servers = pools.servers(case)
        before = servers.all_received_bytes()
        time_s = pools.sample(self._library, case).time_s
        received = servers.all_received_bytes() - before
        self._is_used = float(received > _TALK * case.n_bytes)
        if self._must_be and not self._is_used:
            raise Failure("the workers do such calls alone: their servers received nothing")
        return time_s

    def is_used(self, _pools: WorkerPools, _case: Case) -> float:
        """1 if servers had a part in the calls that were timed last."""
        return self._is_used


class Resent:
    """TCP's segments in all hosts while calls are made: how many were sent, and again."""

    def __init__(self, library: str) -> None:
        self._served = ServedCalls(library, must_be=True)
        self._n_again = self._n_sent = 0

    def time(self, pools: WorkerPools, case: Case) -> float:
        """Seconds of a call, of the slowest rank."""
        pools.sample("servers alone", case)  # all connections are open
        before = _segments(pools, case)
        time_s = self._served.time(pools, case)
        after = _segments(pools, case)
        self._n_sent, self._n_again = (now - then for now, then in zip(after, before, strict=True))
        return time_s

    def n_again(self, _pools: WorkerPools, _case: Case) -> float:
        """Segments that were sent once more."""
        return self._n_again

    def part(self, _pools: WorkerPools, _case: Case) -> float:
        """The same, of all."""
        return self._n_again / max(1, self._n_sent)


def _segments(pools: WorkerPools, case: Case) -> tuple[int, int]:
    """What TCP has sent in all hosts of a case, ever, and of that again."""
    cluster, n_sent, n_again = pools.cluster(case), 0, 0
    for host in range(case.n_hosts + case.n_servers):
        told = cluster.run(host, ["cat", "/proc/net/snmp"], capture_output=True).stdout
        names, numbers = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
        counts = dict(zip(names[1:], map(int, numbers[1:]), strict=True))
        n_sent, n_again = n_sent + counts["OutSegs"], n_again + counts["RetransSegs"]
    return n_sent, n_again


def server_cpu(library: str) -> Measure:
    """CPU seconds that servers spend for each gigabyte that they receive and send back."""

    def measure(pools: WorkerPools, case: Case) -> float:
        pools.sample(library, case)  # connections are open, memory was touched
        servers = pools.servers(case)
        cpu_s, received = servers.cpu_s(), servers.all_received_bytes()
        pools.sample(library, case)
        cpu_s, received = servers.cpu_s() - cpu_s, servers.all_received_bytes() - received
        if received < case.n_bytes:
            raise Failure("the servers received nothing")
        return cpu_s / (received / _GIGABYTE)

    return measure
