"""The benchmark's servers: in a lab, used by its workers, killed and started beneath them."""

import os
import shutil

import pytest

from bench.scoreboard.case import Case
from bench.scoreboard.lab_servers import LabServers
from bench.scoreboard.pools import BenchOptions, WorkerPools
from bench.scoreboard.served_faults import Pauses
from bench.scoreboard.served_measures import ServedCalls, server_cpu

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="NOT TESTED: the lab needs root, ip and tc (iproute2)",
)
CASE = Case(3, 1 << 20, n_hosts=3, rate_mbit=None, n_servers=3, n_samples=1)


def kill_one(servers: LabServers, _over: object) -> int:
    servers.kill(0)
    servers.start(0)
    return 1


def test_workers_of_the_benchmark_have_servers_and_outlive_their_deaths() -> None:
    with WorkerPools(BenchOptions(n_rounds=1)) as pools:
        alone = ServedCalls("servers alone", must_be=True)
        assert alone.time(pools, CASE) > 0
        assert alone.is_used(pools, CASE)
        assert server_cpu("servers alone")(pools, CASE) >= 0
        pools.servers(CASE).drain(2)
        pools.servers(CASE).start(2)
        killed = Pauses(kill_one, for_s=0.5)
        assert killed.longest(pools, CASE) >= 0
        assert killed.n_done(pools, CASE) == 1
        assert killed.n_steps(pools, CASE) >= 1
        pools.clear()
        assert pools.servers(CASE).all_received_bytes() < 1 << 20  # they are new
