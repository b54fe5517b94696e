"""A cut between one worker and one server; all other ranks reach both."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.labs import enter, env_of, needs_root
from process.ranks import start_ranks
from process.serving import N_WORKERS, is_right, job_env, new_key, noise
from process.stage import Stage

import shoal
from shoal.lab import Lab
from shoal.lab.cluster import INTERFACE

pytestmark = needs_root

SERVERS = (N_WORKERS, N_WORKERS + 1)  # hosts
# A call waits 1.2 s for a silent server, and 1.2 s more while others are asked; it was
# 12 s while the connection had to be lost for good first.
MOST_S = 6.0


def servers_of(group: shoal.Group) -> list[str]:
    pool: Any = group.pool  # type: ignore[attr-defined]
    return [] if pool.view is None else [address.host for address in pool.view.servers]


def call_through_a_cut(namespaces: list[str], addresses: list[str]) -> tuple[bool, float]:
    """Return True if all sums are right, and the time of the longest call."""
    rank, right, longest_s = int(os.environ["RANK"]), True, 0.0
    stage = Stage.from_environment()
    stage.cue(f"rank {rank} is here")  # connects, which a host of the cluster cannot do
    enter(namespaces[rank])
    with shoal.init(timeout_s=60.0) as group:
        for number, wanted in enumerate((addresses, addresses[:1], addresses)):
            while True:
                data = noise(group.rank, number)
                begun = time.monotonic()
                group.all_reduce(data)
                longest_s = max(longest_s, time.monotonic() - begun)
                right = right and is_right(data, number)
                there = bytearray([servers_of(group) == wanted])
                group.all_reduce(there, "min")
                if there[0]:
                    break
            sys.stderr.write(f"stage {number}\n")
            stage.cue(f"rank {rank} has stage {number}")
            stage.await_cue(f"stage {number + 1}")
    return right, longest_s


@contextlib.contextmanager
def serving(cluster: Lab, key: Path, addresses: list[str]) -> Iterator[None]:
    argv = [sys.executable, "-m", "shoal", "server", "--key-file", str(key), "--listen"]
    env = {**os.environ, "SHOAL_LINK": "29Mb,10us,1us", "SHOAL_SOCKET_IFNAME": INTERFACE}
    servers = [
        cluster.popen(host, [*argv, address], stderr=subprocess.PIPE, env=env)
        for host, address in zip(SERVERS, addresses, strict=True)
    ]
    try:
        for server in servers:
            assert "serving 1 key" in server.stderr.readline()  # or they count as absent
        yield
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_a_server_that_a_worker_cannot_reach_is_soon_excluded_and_returns(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Lab(N_WORKERS + len(SERVERS), rate_mbit=None) as cluster, Stage() as stage:
        addresses = [cluster.hosts[host].address for host in SERVERS]
        env = job_env(key, *addresses, SHOAL_DEBUG="INFO") | env_of(cluster) | stage.env
        namespaces = [host.namespace for host in cluster.hosts[:N_WORKERS]]
        worker, server = N_WORKERS - 1, SERVERS[1]
        with (
            serving(cluster, key, addresses),
            start_ranks(call_through_a_cut, N_WORKERS, namespaces, addresses, env=env) as ranks,
        ):
            for number, change in enumerate((cluster.cut, cluster.heal, None)):
                for rank in range(N_WORKERS):
                    stage.await_cue(f"rank {rank} has stage {number}")
                if change is not None:
                    change(worker, server)
                    change(server, worker)
                stage.cue(f"stage {number + 1}")
            outcomes = ranks.wait()
    assert [one.value is not None and one.value[0] for one in outcomes] == [True] * N_WORKERS
    assert max(one.value[1] for one in outcomes) < MOST_S, outcomes
    # Before the cut a server that was slow to start may have been left out too.
    lines = outcomes[0].output.partition("stage 0\n")[2].splitlines()
    texts = [line for line in lines if f"server {addresses[1]}" in line]
    assert len(texts) == 2, outcomes[0]
    assert "is not used: it is cut off" in texts[0]
    assert f"between rank {worker} (" in texts[0]
    assert "is used again, after" in texts[1]
