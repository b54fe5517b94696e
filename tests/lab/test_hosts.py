"""All-reduce between hosts: over TCP alone, and together with memory that ranks of a host share."""

import ctypes
import os
import secrets
import shutil
import subprocess

import numpy as np
import pytest
from process.ranks import run_ranks

from shoal.lab import Lab
from shoal.lab.cluster import INTERFACE

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="NOT TESTED: the lab needs root, ip and tc (iproute2)",
)

# Nothing, less than a chunk each, the small-message path, more than a segment, odd.
LENGTHS = [0, 1, 3, 1021, 65_536, 1_000_003]
CLONE_NEWNET = 0x40000000  # linux/sched.h


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from here on, into a host of a cluster."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def integers_of(rank: int, length: int) -> np.ndarray:
    """Small integers: their sums are exact in float32, in whatever order they are folded."""
    return np.random.default_rng((rank, length)).integers(-999, 999, length).astype(np.float32)


def sum_in_host(namespaces: list[str]) -> list[int]:
    """The elements that are wrong, by length."""
    enter(namespaces[int(os.environ["RANK"])])
    import shoal

    n_wrong = []
    with shoal.init() as group:
        for length in LENGTHS:
            data = integers_of(group.rank, length)
            group.all_reduce(data)
            want = sum(integers_of(rank, length) for rank in range(group.size))
            n_wrong.append(int(np.count_nonzero(data != want)))
    return n_wrong


@pytest.mark.parametrize("n_ranks_per_host", [1, 2])
@pytest.mark.parametrize("n_hosts", [2, 4])
def test_an_all_reduce_between_hosts_equals_numpys_sum(n_hosts: int, n_ranks_per_host: int) -> None:
    with Lab(n_hosts) as cluster:
        namespaces = [host.namespace for host in cluster.hosts for _ in range(n_ranks_per_host)]
        env = {
            "MASTER_ADDR": cluster.hosts[0].address,
            "SHOAL_SOCKET_IFNAME": INTERFACE,
            "SHOAL_KEY": secrets.token_hex(32),
        }
        found = run_ranks(sum_in_host, len(namespaces), namespaces, env=env)
    assert found == [[0] * len(LENGTHS)] * len(namespaces)


def sum_while_the_only_path_is_cut(namespaces: list[str]) -> list[int]:
    """How many elements are wrong in calls made before, during and after two seconds without it."""
    enter(namespaces[int(os.environ["RANK"])])
    import shoal

    n_wrong = []
    with shoal.init() as group:
        want = sum(integers_of(rank, LENGTHS[-1]) for rank in range(group.size))
        for turn in range(4):
            data = integers_of(group.rank, LENGTHS[-1])
            if turn == 1 and group.rank == 0:
                subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
            work = group.all_reduce(data, async_op=True)
            if turn == 1 and group.rank == 0:
                cut = f"sleep 2; ip link set {INTERFACE} up"
                subprocess.run(["sh", "-c", cut], check=True)
            work.wait()
            n_wrong.append(int(np.count_nonzero(data != want)))
    return n_wrong


def test_a_network_that_is_cut_for_two_seconds_fails_no_call() -> None:
    with Lab(2) as cluster:
        namespaces = [host.namespace for host in cluster.hosts]
        env = {
            "MASTER_ADDR": cluster.hosts[0].address,
            "SHOAL_SOCKET_IFNAME": INTERFACE,
            "SHOAL_KEY": secrets.token_hex(32),
        }
        found = run_ranks(sum_while_the_only_path_is_cut, 2, namespaces, env=env)
    assert found == [[0] * 4] * 2
