"""The same job on the same machines: the same choices and the same bits, each time it runs.

The two runs differ in all that can be measured: NICs of one tenth of the rate, and cores that
other work keeps busy. The interfaces report the same.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from lab.labs import enter, env_of, needs_root
from process.ranks import run_ranks

from shoal.lab import Lab

pytestmark = needs_root

N_HOSTS = 4
# Where the algorithms of neighbouring choices fold in another order.
SIZES_KIB = (16, 64, 256, 512)


def choose_and_sum(namespaces: list[str]) -> tuple[dict[str, tuple[object, ...]], dict[int, str]]:
    """Every choice by collective and size; and a digest of the sum for each of the sizes."""
    enter(namespaces[int(os.environ["RANK"])])
    import shoal
    from shoal.schedule import COLLECTIVES

    digests = {}
    with shoal.init() as group:
        choices = {
            f"{collective} {power}": tuple(group.planner.choose(collective, 1 << power))
            for collective in COLLECTIVES
            for power in range(2, 29)
        }
        for kib in SIZES_KIB:
            # Any two orders of these give other bits.
            data = np.random.default_rng((group.rank, kib)).lognormal(0, 6, kib << 8)
            data = data.astype(np.float32)
            group.all_reduce(data)
            digests[kib] = hashlib.sha256(data.tobytes()).hexdigest()
    return choices, digests


def run_on(rate_mbit: float, n_busy: int, extra: Mapping[str, str]) -> list[Any]:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Lab(N_HOSTS, rate_mbit))
        for _ in range(n_busy):
            busy = cluster.popen(0, [sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        namespaces = [host.namespace for host in cluster.hosts]
        env = {**env_of(cluster), **extra}
        return run_ranks(choose_and_sum, N_HOSTS, namespaces, env=env)


def test_two_runs_of_a_job_choose_alike_and_sum_to_the_same_bits_whatever_the_load() -> None:
    outcomes = [*run_on(1000, 0, {}), *run_on(100, 3, {})]
    assert outcomes == [outcomes[0]] * len(outcomes)


def test_other_orders_of_folds_give_other_bits_so_that_equal_ones_prove_something() -> None:
    ring, doubling = (run_on(1000, 0, {"SHOAL_ALGO": name})[0][1] for name in ("ring", "doubling"))
    assert all(ring[kib] != doubling[kib] for kib in SIZES_KIB)
