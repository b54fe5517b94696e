"""A lost and closed group frees everything without the cycle collector."""

import gc
import os
import signal
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from process.ranks import start_ranks
from process.stage import Stage, descriptors, pretend_hosts

import shoal
from shoal.errors import PeerLost

SIZE = 3


def held() -> set[str]:
    """Return the descriptors of this process and its mappings of shared memory."""
    with open("/proc/self/maps") as maps:
        found = {line for line in maps if "shoal" in line and "memfd" in line}
    return found | {f"{fd} {name}" for fd, name in descriptors().items()}


def reduce_until_lost(group: shoal.Group, buffers: list[Callable[[], object]]) -> PeerLost:
    data = np.ones(1 << 20)
    buffers.append(weakref.ref(data))
    try:
        while True:
            group.all_reduce(data)
    except PeerLost as error:
        return error


def lose_a_rank(ranks_per_host: int) -> tuple[set[str], bool]:
    """Return what the process holds while it keeps the error, and if the buffer outlives it."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    gc.collect()
    gc.disable()
    before = held()
    group = shoal.init()
    group.barrier()
    stage.cue(f"rank {group.rank} is there")
    buffers: list[Callable[[], object]] = []
    lost = reduce_until_lost(group, buffers)
    group.close()
    left = held() - before
    assert str(lost)
    del lost
    return left, buffers[0]() is not None


@pytest.mark.parametrize("ranks_per_host", [SIZE, 1])
def test_a_lost_and_closed_group_holds_no_memory_though_its_error_is_kept(
    ranks_per_host: int,
) -> None:
    with (
        Stage() as stage,
        start_ranks(lose_a_rank, SIZE, ranks_per_host, env=stage.env) as ranks,
    ):
        for rank in range(SIZE):
            stage.await_cue(f"rank {rank} is there")
        os.kill(ranks.pid(1), signal.SIGKILL)
        first, _, last = ranks.wait(30)
    for outcome in (first, last):
        assert outcome.value == (set(), False), outcome
