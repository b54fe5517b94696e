"""The native core keeps only subgroups that are referenced or have calls."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
from unit.in_process import run_well

import shoal

N_GROUPS = 30


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()  # so that garbage stays uncollected
    try:
        yield
    finally:
        gc.enable()


def n_native(group: shoal.Group) -> int:
    """Return the number of groups that the links of this group know."""
    assert group.mesh is not None
    state = group.mesh.state(10.0)
    assert state is not None
    return len(state["groups"])


def drop_many(world: shoal.Group, how: str) -> list[int]:
    before = n_native(world)
    world.barrier()  # none of them was used before
    for number in range(N_GROUPS):
        sub = world.subgroup(range(world.size), f"sub {number}")
        work = sub.all_reduce(np.ones(100, np.float32), async_op=how == "in the background")
        if work is not None:
            work.wait()
        if how == "closed":
            sub.close()
        del sub, work
        world.barrier()
    return [before, n_native(world)]


def test_unreferenced_subgroups_are_freed() -> None:
    with without_collector():
        for how in ("at once", "in the background", "closed"):
            assert run_well(drop_many, 2, how) == [[1, 1]] * 2, how


def drop_with_a_call(world: shoal.Group) -> list[Any]:
    """Rank 0 drops a subgroup whose call rank 1 has not made yet."""
    sub, data = world.subgroup(range(2), "sub"), np.full(100_000, 1 + world.rank, np.float32)
    if world.rank == 0:
        sub.all_reduce(data, async_op=True)
        del sub
        held = n_native(world)
        world.barrier()
    else:
        held = 2
        world.barrier()
        sub.all_reduce(data)
        del sub
    world.barrier()
    world.subgroup(range(2), "another")  # its end frees earlier dropped groups
    return [held, float(data[0]), n_native(world)]


def test_a_subgroup_dropped_with_a_call_in_flight_ends_after_it() -> None:
    with without_collector():
        assert run_well(drop_with_a_call, 2) == [[2, 3.0, 1]] * 2
