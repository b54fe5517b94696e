"""The native core keeps only subgroups that are referenced or have calls."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.in_process import in_ranks, run_well

from shoal import Group
from shoal.group import context


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.disable()  # so that garbage stays uncollected
    yield
    gc.enable()


def n_native(group: Group) -> int:
    """Return the number of groups that the links of this group know."""
    return len(group.mesh.state(10.0)["groups"])


@pytest.mark.parametrize("how", ["at once", "in the background", "closed"])
@in_ranks(2)
def test_unreferenced_subgroups_are_freed(world: Group, how: str) -> None:
    assert n_native(world) == 1
    world.barrier()  # none of them was used before
    for number in range(30):
        sub = world.subgroup(range(world.size), f"sub {number}")
        work = sub.all_reduce(np.ones(100, np.float32), async_op=how == "in the background")
        if work is not None:
            work.wait()
        if how == "closed":
            sub.close()
        del sub, work
        world.barrier()
    assert n_native(world) == 1


@in_ranks(2)
def test_a_subgroup_dropped_with_a_call_in_flight_ends_after_it(world: Group) -> None:
    sub, data = world.subgroup(range(2), "sub"), np.full(100_000, 1 + world.rank, np.float32)
    if world.rank == 0:
        sub.all_reduce(data, async_op=True)
        del sub
        assert n_native(world) == 2
        world.barrier()
    else:  # makes the call after rank 0 has dropped the subgroup
        world.barrier()
        sub.all_reduce(data)
        del sub
    world.barrier()
    world.subgroup(range(2), "another")  # its end frees earlier dropped groups
    assert data[0] == 3.0
    assert n_native(world) == 1


def test_closing_waits_for_all_calls_of_shoals_own_until_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close_with_calls_in_flight(world: Group) -> list[float]:
        waits: list[float] = []
        call: Any = SimpleNamespace(wait=waits.append, done=lambda: False)
        for _ in range(3):
            world.await_at_close(call)
        clock = iter([10.0, 10.0, 15.0, 30.0])
        monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: next(clock, 30.0)))
        world.close()
        return waits

    assert run_well(close_with_calls_in_flight, 1) == [[12.0, 7.0, 0.0]]
