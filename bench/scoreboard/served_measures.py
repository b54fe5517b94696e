"""The measures of servers: times, optimum, line, and the servers' CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from bench.scoreboard.streams import STREAM_BYTES, Flow, measure_streams
from shoal.bench.job import Failure
from shoal.plan.cluster import Nic
from shoal.plan.shares import best_shares

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools

_GIGABYTE: Final = 1e9
# A share of a tensor's bytes. If a server's NIC carries fewer, they are only control messages.
_TALK: Final = 0.02


def one_stream(pools: WorkerPools, case: Case) -> float:
    """Measure the bytes per second of raw TCP between two workers, a stream over each NIC."""
    n_nics = 1 + len(case.more_mbit)
    flows = [Flow(0, 1, nic) for nic in range(n_nics)]
    return sum(measure_streams(pools.cluster(case), flows, STREAM_BYTES // n_nics))


def optimum(pools: WorkerPools, case: Case) -> float:
    """Measure the seconds of the linear program's best shares at the rate of a raw stream.

    With as many servers as workers that is the tensor's time on the stream.
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
    """Measure the seconds of all workers' tensors over the servers' NICs at a raw stream's rate."""
    return case.n_ranks * case.n_bytes / case.n_servers / one_stream(pools, case)


class ServedCalls(NamedTuple):
    """A call's seconds on the slowest rank, and 1 if servers had a part in the timed calls."""

    time_s: float
    is_used: float


def served_calls(library: str, pools: WorkerPools, case: Case) -> ServedCalls:
    """Measure calls of a library with servers: the median of the samples of a round."""
    servers = pools.servers(case)
    before = servers.all_received_bytes()
    time_s = pools.sample(library, case).time_s
    received = servers.all_received_bytes() - before
    return ServedCalls(time_s, float(received > _TALK * case.n_bytes))


def served_time(library: str) -> Measure:
    """Measure the seconds of a call; Failure if servers had no part in it."""

    def measure(pools: WorkerPools, case: Case) -> float:
        calls = served_calls(library, pools, case)
        if not calls.is_used:
            raise Failure("the workers do such calls alone: their servers received nothing")
        return calls.time_s

    return measure


class Resent(NamedTuple):
    """The seconds of a call, and the TCP segments of all hosts meanwhile."""

    time_s: float
    n_sent: int
    n_again: int


def resent(library: str, pools: WorkerPools, case: Case) -> Resent:
    """Measure calls and count the segments that were sent, and sent again."""
    pools.sample(library, case)  # all connections are open
    before = _segments(pools, case)
    time_s = served_time(library)(pools, case)
    counts = (now - then for now, then in zip(_segments(pools, case), before, strict=True))
    return Resent(time_s, *counts)


def _segments(pools: WorkerPools, case: Case) -> tuple[int, int]:
    """Return the TCP segments that all hosts of a case have sent, and sent again."""
    cluster, n_sent, n_again = pools.cluster(case), 0, 0
    for host in range(case.n_hosts + case.n_servers):
        text = cluster.run(host, ["cat", "/proc/net/snmp"], capture_output=True).stdout
        names, numbers = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        counts = dict(zip(names[1:], map(int, numbers[1:]), strict=True))
        n_sent, n_again = n_sent + counts["OutSegs"], n_again + counts["RetransSegs"]
    return n_sent, n_again


def server_cpu(library: str) -> Measure:
    """Measure the servers' CPU seconds for each gigabyte that they receive and send back."""

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
