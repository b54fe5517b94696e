"""The advertised address on hosts whose default route or name misleads."""

import os
import subprocess
import sys
from typing import Any

import pytest
from lab.labs import env_of, needs_root

from shoal.lab import Lab
from shoal.lab.names import ip, write_hosts

pytestmark = needs_root

PROGRAM = """
import numpy as np, shoal
with shoal.init(timeout_s=30.0) as group:
    data = np.ones(100_000, np.float32)
    group.all_reduce(data)
    print("sum", data[0], data[-1])
"""


def lines_of_ranks(cluster: Lab) -> list[list[str]]:
    """Return the output and log of a rank on each host, without a given interface."""
    env = {**os.environ, **env_of(cluster), "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    del env["SHOAL_SOCKET_IFNAME"]
    env |= {"WORLD_SIZE": str(len(cluster.hosts)), "SHOAL_DEBUG": "DEBUG"}
    argv = [sys.executable, "-c", PROGRAM]
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [
        cluster.popen(host.index, argv, env={**env, "RANK": str(host.index)}, **to)
        for host in cluster.hosts
    ]
    return [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]


def add_docker0(cluster: Lab, host: int, *, default: bool = True) -> None:
    """Give a host a bridge to nowhere; with `default` it is the default route."""
    inside = cluster.hosts[host].namespace
    ip("-n", inside, "link", "add", "docker0", "type", "bridge")
    ip("-n", inside, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    ip("-n", inside, "link", "set", "docker0", "up")
    if default:
        ip("-n", inside, "route", "add", "default", "via", "172.17.0.2")


def name_hosts(cluster: Lab, host: int, *own: str) -> None:
    """Map a host's name to these addresses on itself; other hosts use its first NIC."""
    lines = ["127.0.0.1 localhost", *(f"{address} host{host}" for address in own)]
    lines += [f"{one.address} {one.name}" for one in cluster.hosts if one.index != host]
    write_hosts(cluster.hosts[host].namespace, "".join(f"{line}\n" for line in lines))


def assert_advertised(lines: list[list[str]], *want: str) -> None:
    for rank, text in enumerate(want):
        line_end = f"group 'world': rank {rank} listens at {text}"
        assert any(line.endswith(line_end) for line in lines[rank]), lines[rank]
        assert "sum 2.0 2.0" in lines[rank]


def test_a_default_route_through_docker0_is_ignored_where_the_master_is_known() -> None:
    with Lab(2, None) as cluster:
        for host in (0, 1):
            add_docker0(cluster, host)
        lines = lines_of_ranks(cluster)
    why = "by the route to host0"
    assert_advertised(lines, f"10.77.0.1 (eth0), {why}", f"10.77.0.2 (eth0), {why}")


@pytest.mark.parametrize(
    ("own", "is_docker_default", "why"),
    [
        (("127.0.1.1", "10.77.0.1"), True, "the route to host0"),
        (("127.0.1.1",), False, "the default route"),
        (("127.0.1.1",), None, "the only interface"),
    ],
)
def test_a_rank_0_named_loopback_is_reachable(own: Any, is_docker_default: Any, why: str) -> None:
    with Lab(2, None) as cluster:
        name_hosts(cluster, 0, *own)
        if is_docker_default is not None:
            add_docker0(cluster, 0, default=is_docker_default)
        if is_docker_default is False:
            ip("-n", cluster.hosts[0].namespace, "route", "add", "default", "dev", "eth0")
        lines = lines_of_ranks(cluster)
    assert_advertised(
        lines, f"10.77.0.1 (eth0), by {why}", "10.77.0.2 (eth0), by the route to host0"
    )
