"""All-reduce between hosts: over TCP alone, and combined with shared memory in a host."""

import os

import numpy as np
import pytest
from lab.labs import enter, env_of, needs_root
from process.ranks import run_ranks

from shoal.lab import Lab

pytestmark = needs_root

# Empty, less than a chunk each, the small-message path, more than a segment, odd.
LENGTHS = [0, 1, 3, 1021, 65_536, 1_000_003]


def integers_of(rank: int, length: int) -> np.ndarray:
    """Return small integers, whose sums are exact in float32 in any order."""
    return np.random.default_rng((rank, length)).integers(-999, 999, length).astype(np.float32)


def sum_in_host(namespaces: list[str]) -> list[int]:
    """Return the number of wrong elements, by length."""
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


@pytest.mark.parametrize(("n_hosts", "n_ranks_per_host"), [(2, 2), (4, 1)])
def test_an_all_reduce_between_hosts_equals_numpys_sum(n_hosts: int, n_ranks_per_host: int) -> None:
    with Lab(n_hosts) as cluster:
        namespaces = [host.namespace for host in cluster.hosts for _ in range(n_ranks_per_host)]
        found = run_ranks(sum_in_host, len(namespaces), namespaces, env=env_of(cluster))
    assert found == [[0] * len(LENGTHS)] * len(namespaces)
