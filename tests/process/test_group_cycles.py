"""Groups made and ended over and over leave nothing behind in the process or on the machine.

`SHOAL_SOAK=1` makes it ten thousand times, as `make test-soak` does; it takes minutes.
"""

import gc
import os
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import Stage

import shoal

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_CYCLES = 10_000 if SOAK else 300
N_FIRST = 30  # loads and grows whatever is loaded or grows once


def lines(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def holdings() -> dict[str, Any]:
    """Everything of this process that a group could have left behind."""
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    maps = lines("/proc/self/maps")
    return {
        "descriptors": len(links),
        "shared memory": sum("memfd" in line for line in maps) + sum("memfd" in to for to in links),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(maps),
        "resident KiB": int(lines("/proc/self/status")[21].split()[1]),
        "objects": len(gc.get_objects()),
    }


def cycle(stage: Stage, rank: int) -> None:
    """A short life with a bit of everything in it."""
    shared, private = shoal.empty(40_000), np.ones(40_000, np.float32)
    shared[:] = 1
    with shoal.init(stage.store, rank, 2) as group:
        part = group.subgroup([1, 0], "part")
        group.all_reduce(shared)
        work = part.all_reduce(private, async_op=True)
        assert work is not None
        work.wait()
        group.barrier()
    assert shared[0] == private[-1] == 2


def live_many_lives(n_cycles: int, ranks_per_host: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rank = int(os.environ["RANK"])
    os.environ["SHOAL_HOST_ID"] = str(rank // ranks_per_host)
    with Stage.from_environment() as stage:
        for _ in range(N_FIRST):
            cycle(stage, rank)
        before = holdings()
        for _ in range(n_cycles):
            cycle(stage, rank)
        return before, holdings()


def files_of_shoal() -> set[str]:
    """What outlives processes: names of shared memory and of sockets that bear our name."""
    names = {name for name in os.listdir("/dev/shm") if "shoal" in name}
    return names | {row.split()[-1] for row in lines("/proc/net/unix") if "shoal" in row}


@pytest.mark.timeout(1800 if SOAK else 120)
@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_many_groups_leave_nothing_behind(ranks_per_host: int) -> None:
    on_the_machine = files_of_shoal()
    with Stage() as stage:
        args = N_CYCLES // (3 - ranks_per_host), ranks_per_host
        results = run_ranks(live_many_lives, 2, *args, env=stage.env, deadline_s=1700)
    assert files_of_shoal() <= on_the_machine
    for before, after in results:
        for what in ("descriptors", "shared memory", "threads"):
            assert after[what] == before[what], (what, before, after)
        # The allocator may map a little more or less from one moment to the next.
        assert after["mappings"] <= before["mappings"] + 10, (before, after)
        assert after["resident KiB"] < before["resident KiB"] + 4096, (before, after)
        assert after["objects"] < before["objects"] + 1000, (before, after)
