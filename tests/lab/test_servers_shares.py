"""Servers that report no rate, some of them half as fast: a probe finds those."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from lab.labs import needs_root
from process.serving import new_key

from shoal.lab import Lab

pytestmark = [
    needs_root,
    pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes"),
    pytest.mark.timeout(600),
]
RATE, SLOW = 100, 50  # Mbit/s
N_CALLS = 7
PROGRAM = f"""
import time
import numpy as np, shoal
with shoal.init(timeout_s=120) as group:
    data = np.ones(1 << 21, np.float32)
    group.all_reduce(data)
    for _ in range({N_CALLS}):
        begun = time.monotonic()
        group.all_reduce(data)
        if group.rank == 0:
            print(time.monotonic() - begun, flush=True)
"""


def times_of(n: int, k: int, key: Path, *, is_known: bool) -> list[float]:
    """Return the time of each call; every second server is slow, which is known or not."""
    slow = {host: [SLOW] for host in range(n, n + k, 2)}
    with Lab(n + k, rate_mbit=RATE, apart=slow) as lab:
        servers = []
        for host in range(n, n + k):
            own = lab.environment_of(host, [host])
            if not is_known:
                own["SHOAL_LINK"] = ""  # a veth pair reports no real rate
            argv = [sys.executable, "-m", "shoal", "server", "--listen", "eth0"]
            argv += ["--key-file", str(key)]
            servers.append(lab.popen(host, argv, env={**os.environ, **own}))
        common = {
            "WORLD_SIZE": str(n),
            "MASTER_ADDR": lab.hosts[0].address,
            "MASTER_PORT": "29500",
            "SHOAL_KEY_FILE": str(key),
            "SHOAL_SERVERS": ",".join(host.address for host in lab.hosts[n:]),
            "SHOAL_SERVERS_REQUIRED": str(k),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        ranks = []
        for rank in range(n):
            env = {**os.environ, **common, **lab.environment_of(rank, range(n)), "RANK": str(rank)}
            argv = [sys.executable, "-c", PROGRAM]
            ranks.append(lab.popen(rank, argv, env=env, stdout=subprocess.PIPE))
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * n
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(30)
    return [float(took) for took in outputs[0].split()]


@pytest.mark.parametrize(("n", "k"), [(4, 4), (8, 4)])
def test_calls_are_about_as_fast_as_with_known_server_rates(tmp_path: Path, n: int, k: int) -> None:
    key = new_key(tmp_path)
    known = statistics.median(times_of(n, k, key, is_known=True))
    assert statistics.median(times_of(n, k, key, is_known=False)) < 1.15 * known
