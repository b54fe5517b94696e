"""Groups that are formed and closed repeatedly leave nothing behind.

`SHOAL_SOAK=1` repeats it ten thousand times, as `make test-soak` does; it takes minutes.
"""

import os

import numpy as np
import pytest
from process.ranks import on_new_ranks
from process.stage import Stage, holdings, pretend_hosts

import shoal

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_CYCLES = 10_000 if SOAK else 100
N_FIRST = 20  # one-time loads and growth


def cycle(stage: Stage, rank: int) -> None:
    shared, private = shoal.empty(40_000), np.ones(40_000, np.float32)
    shared[:] = 1
    with shoal.init(stage.store, rank, 2) as group:
        part = group.subgroup([1, 0], "part")
        group.all_reduce(shared)
        work = part.all_reduce(private, async_op=True)
        work.wait()
        group.barrier()
    assert shared[0] == private[-1] == 2


@pytest.mark.timeout(1800 if SOAK else 240)
@pytest.mark.parametrize("ranks_per_host", [2, 1])
@on_new_ranks(2, has_stage=True, deadline_s=1700)
def test_many_groups_leave_nothing_behind(ranks_per_host: int) -> None:
    rank = int(os.environ["RANK"])
    pretend_hosts(ranks_per_host)
    with Stage.from_environment() as stage:
        for _ in range(N_FIRST):
            cycle(stage, rank)
        before = holdings()
        for _ in range(N_CYCLES):
            cycle(stage, rank)
        after = holdings()
    # Named shared memory outlives its processes; shoal's has no name.
    assert not [name for name in os.listdir("/dev/shm") if "shoal" in name]
    for what in ("descriptors", "shared mappings", "threads"):
        assert after[what] == before[what], (what, before, after)
    # The allocator may keep a little more or less from one moment to the next.
    assert after["mappings"] <= before["mappings"] + 10, (before, after)
    assert after["resident KiB"] < before["resident KiB"] + (16 << 10), (before, after)
    assert after["objects"] < before["objects"] + 330, (before, after)
