"""Any number of channels between hosts, and any set of reducers: equal bits, shared faults."""

import contextlib
import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from contract.fold_orders import FLOOR_BYTES, folded, own
from process.arrays import Array, digest, filled, private, shared
from process.ranks import on_ranks, on_survivors
from process.serving import noise
from process.stage import die, error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost
from shoal.plan import Planner
from shoal.plan.settings import Forced
from shoal.state.document import describe
from shoal.state.text import text_of

N_ELEMS = 540_011  # 2.06 MiB: cut where there are channels, and into unequal parts


def digests(n_channels: int) -> list[str]:
    """Digest sums, which are near NumPy's; test_numpy_algorithms.py has the other collectives."""
    os.environ["SHOAL_CHANNELS"] = str(n_channels)
    found = []
    with shoal.init() as group:
        rank, size = group.rank, group.size
        assert group.planner.n_channels == n_channels
        every = [noise(each, 0, N_ELEMS) for each in range(size)]
        whole = np.concatenate(every)
        reduced, scattered = every[rank].copy(), np.empty(N_ELEMS, np.float32)
        group.all_reduce(reduced)
        group.reduce_scatter(scattered, whole)
        for data, wanted in ((reduced, np.add.reduce(every)), (scattered, size * every[rank])):
            assert np.allclose(data, wanted, rtol=1e-5, atol=1e-5)
            found.append(digest(data))
        group.reduce(every[rank], root=1)
        found.append(digest(every[1]))
    return found


@pytest.mark.parametrize(("ranks_per_host", "n_channels"), [(1, 3), (2, 2)])
@on_ranks(3)
def test_any_number_of_channels_gives_the_bits_of_one_channel(
    ranks_per_host: int, n_channels: int
) -> None:
    pretend_hosts(ranks_per_host)
    assert digests(n_channels) == digests(1)


def names_of_threads() -> set[str]:
    """Return the names of this process's threads; one may end meanwhile."""
    names = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.add((task / "comm").read_text().strip())
    return names


@on_ranks(2, env={"SHOAL_CHANNELS": "2"})
def test_every_channel_has_a_named_thread_and_the_dump_shows_a_call_in_each_that_it_uses() -> None:
    pretend_hosts(1)
    with shoal.init() as group:
        assert {"shoal-progress", "shoal-progress1"} <= names_of_threads()
        data = np.ones(N_ELEMS, np.float32)
        if group.rank == 0:
            work = group.all_reduce(data, async_op=True)
            state = describe("a test asks")
            (world,) = state["worlds"]
            (calls,) = [each["in_flight"] for each in world["groups"]]
            assert [call.get("channel", 0) for call in calls] == [0, 1]
            assert "over 2 channels" in text_of(state)
            assert "over channel 1: made" in text_of(state)
            group.barrier(name="asked")
            work.wait()
        else:
            group.barrier(name="asked")
            group.all_reduce(data)


@on_survivors(3, 1, env={"SHOAL_CHANNELS": "2"})
def test_after_a_death_in_a_split_call_the_group_keeps_all_its_channels() -> None:
    pretend_hosts(1)
    group = shoal.init()
    every = [noise(rank, 0, N_ELEMS) for rank in range(3)]
    data = np.ones(8 << 20, np.float32)
    group.all_reduce(data)
    work = group.all_reduce(data, async_op=True)
    if group.rank == 1:
        die()
    error = error_of(work.wait) or error_of(group.barrier)
    assert isinstance(error, PeerLost), error
    assert error.rank == 1
    with group.shrink(timeout_s=40) as rest:
        before = moved()
        mine = np.multiply(every[rest.view.ranks[rest.rank]], 2)  # exact
        rest.all_reduce(mine)
        np.testing.assert_array_equal(mine, 2 * (every[0] + every[2]))
        busy = [key for key, n_bytes in moved().items() if n_bytes - before[key] > N_ELEMS // 2]
        rest.barrier()  # no rank leaves before all have looked
        assert rest.view.ranks == (0, 2)
        assert sorted(busy) == [(channel, 2 - group.rank) for channel in range(2)]


def moved() -> dict[tuple[int, int], int]:
    """Return the bytes sent to living peers, by channel and peer."""
    (world,) = describe("a test asks")["worlds"]
    peers = [peer for peer in world["peers"] if peer["state"] == "alive"]
    return {(peer.get("channel", 0), peer["rank"]): peer["n_bytes_out"] for peer in peers}


@functools.cache
def given_and_sum(size: int, n_elems: int, dtype: str, fold: np.ufunc) -> tuple[list[Array], bytes]:
    values = [own(rank, n_elems, dtype) for rank in range(size)]
    return values, folded(values, fold).tobytes()


def check(group: shoal.Group, name: str, n_elems: int, dtype: str, fold: np.ufunc) -> None:
    values, want = given_and_sum(group.size, n_elems, dtype, fold)
    if name == "direct":  # in the order of the ranks
        want = functools.reduce(fold, values).tobytes()
    for memory in (private, shared):
        data = filled(memory, values[group.rank])
        group.all_reduce(data, {np.add: "sum", np.multiply: "product"}[fold])
        assert data.tobytes() == want, f"{name}, {n_elems} {dtype}"


@pytest.mark.parametrize(("size", "ranks_per_host"), [(4, 4), (3, 1)])
@on_ranks()
def test_any_reducers_yield_equal_bits(size: int, ranks_per_host: int) -> None:
    """Use one stripe, three, one per worker, and several segments per worker."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        sets = filter(any, itertools.product((0, 1), repeat=size))
        names = [f"sharded[{','.join(map(str, chosen))}|]" for chosen in sets]
        planner = group.planner
        for name in (*names, "sharded", "direct"):
            group.plan_by(Planner(planner.cluster, Forced(name, name)))
            assert group.planner.choose("all_reduce", 4096).name == name
            for n_elems in (1009, 3 * FLOOR_BYTES // 4 + 7, size * FLOOR_BYTES // 4 + 13):
                check(group, name, n_elems, "float32", np.add)
            if name in (names[1], "sharded"):
                check(group, name, 300_007, "float32", np.add)
                check(group, name, size * FLOOR_BYTES // 2 + 5, "float16", np.add)
                check(group, name, size * FLOOR_BYTES // 8 + 5, "float64", np.multiply)
        group.plan_by(planner)
