"""`ChunkTopK` between hosts: no value is lost, few bytes travel, and steps outlive servers."""

import contextlib
from typing import Any

import numpy as np
import pytest
from process import serving
from process.arrays import Array, digest
from process.ranks import on_ranks
from process.stage import bytes_out, bytes_since, pretend_hosts
from unit.averages import averaged

import shoal
from shoal.average import Averager, ChunkTopK
from shoal.errors import Unsupported, UsageError

N_STEPS = 5
CHUNK = 4096  # elements
# Steps that flush residuals: 8 bits are exact; 2 bits leave a quarter of an element each time.
MOST_STEPS = {8: 200, 2: 80}


def whole(rank: int, step: int, n_elems: int) -> Array:
    """Return multiples of 1/8 of very different sizes, whose sums are exact."""
    random = np.random.default_rng((rank, step))
    drawn = random.integers(-4000, 4000, n_elems) * 2.0 ** random.integers(-6, 1, n_elems)
    return np.asarray(np.round(drawn) / 8, np.float32)


def average(averager: Averager, given: Any) -> Array:
    return averaged(averager, {"a": given})["a"]


def arrived(group: shoal.Group, n_elems: int, bits: int) -> str:
    """Check that all given values arrive; return a digest of the received ones."""
    scheme = ChunkTopK(share=0.2, bits=bits)
    averager = Averager(group, {"a": ((n_elems,), "float32")}, compress=scheme)
    average(averager, 0)  # the first step, in which reducers keep no residual
    got, given = np.zeros(n_elems), np.zeros(n_elems)
    for step in range(N_STEPS):
        averages = average(averager, whole(group.rank, step, n_elems))
        assert 0 < np.count_nonzero(averages) <= 0.25 * n_elems + 8
        got += averages
        given += sum(whole(rank, step, n_elems) for rank in range(group.size))
    assert (got * group.size != given).any() or n_elems < 9
    for _ in range(MOST_STEPS[bits]):
        is_left = np.array([averager.state_dict()["residuals"]["a"].any()], np.int32)
        group.all_reduce(is_left)
        averages = average(averager, 0)
        got += averages
        if not is_left[0] and not averages.any():  # so reducers have no residual left either
            break
    np.testing.assert_allclose(got * group.size, given, rtol=0, atol=0 if bits == 8 else 1e-3)
    return digest(got)


@pytest.mark.parametrize(("size", "n_elems"), [(1, 5000), (2, 20_003), (4, 9000), (2, 3)])
@on_ranks()
def test_the_values_given_over_all_steps_are_the_averages_plus_the_residuals(
    size: int, n_elems: int
) -> list[str]:
    pretend_hosts(1)
    with shoal.init(timeout_s=60.0) as group:
        return [arrived(group, n_elems, bits) for bits in (8, 2)]


@serving.with_a_server(2)
def test_a_server_keeps_dropped_values_as_residuals() -> str:
    with serving.served_group(timeout_s=60.0) as group:
        return arrived(group, 1_000_003, 8)


@serving.with_a_dying_server()
def test_a_server_lost_in_mid_step_costs_its_residual_and_no_step() -> list[str]:
    n_elems, digests = 4_000_003, []
    with serving.served_group(timeout_s=60.0) as group:
        averager = Averager(group, {"a": ((n_elems,), "float32")}, compress=ChunkTopK(0.05))
        killing = serving.while_the_server_dies(group)
        for step in range(5):
            averager.begin()["a"][...] = whole(group.rank, step, n_elems)
            with killing if step == 2 else contextlib.nullcontext():
                averager.ready("a")
            averager.wait()
            assert 0 < np.count_nonzero(averager.arrays["a"]) <= 0.06 * n_elems
            digests.append(digest(averager.arrays["a"]))
    return digests


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_the_bytes_of_a_worker_do_not_grow_with_the_number_of_ranks(size: int) -> None:
    pretend_hosts(1)
    n_elems = 1 << 20
    with shoal.init() as group:
        averager = Averager(group, {"a": ((n_elems,), "float32")}, compress=ChunkTopK(0.01))
        for step in range(2):
            average(averager, whole(group.rank, step, n_elems))
        group.barrier()
        before = bytes_out()
        for step in range(4):
            average(averager, whole(group.rank, step, n_elems))
        group.barrier()
        sent = np.array([bytes_since(before) / 4])
        group.all_reduce(sent, "max")
        wide = 4 * n_elems * 2 * (size - 1) / size  # as every sharded reduction
        assert wide / 170 < sent[0] < wide / 100


@on_ranks(3)
def test_top_k_is_refused_on_hosts_with_several_ranks() -> None:
    pretend_hosts(2)
    with shoal.init() as group, pytest.raises(Unsupported, match="ranks 0, 1 share a host"):
        Averager(group, {"a": ((99,), "float32")}, compress=ChunkTopK())


def case_ranks_that_send_different_shares_are_named_with_both_shares(group: shoal.Group) -> None:
    scheme = ChunkTopK((0.01, 0.02)[group.rank])
    with pytest.raises(UsageError, match="compress is not the same on all ranks") as options:
        Averager(group, {"a": ((99,), "float32")}, compress=scheme)
    averager = Averager(group, {"a": ((9999,), "float32")}, compress=ChunkTopK(0.01, warm_up=2))
    average(averager, 1)
    state = averager.state_dict()
    averager.load_state_dict({**state, "n_steps": 2 * group.rank})
    with pytest.raises(UsageError) as calls:
        average(averager, 1)
    for error, facts in (
        (options, ["share=0.01", "share=0.02"]),
        (calls, ["topk:0.25:8", "topk:0.0100098:8"]),
    ):
        assert all(words in str(error.value) for words in facts), error


def two_of_a_chunk(group: shoal.Group, n_chunks: int = 1) -> Averager:
    """Return an averager whose ranks send two values of each chunk."""
    scheme = ChunkTopK(share=2 / CHUNK)
    return Averager(group, {"a": ((n_chunks * CHUNK,), "float32")}, compress=scheme)


def case_no_value_of_a_non_finite_step_arrives_in_a_later_step(group: shoal.Group) -> None:
    """Reducers drop half of the largest values, in chunks beside the non-finite one."""
    averager = two_of_a_chunk(group, 4)
    for _ in range(2):
        assert not average(averager, 0).any()
    given = np.zeros(4 * CHUNK, np.float32)
    for first in (CHUNK, 3 * CHUNK):
        given[first + 10 * group.rank :][:2] = 2.0**100
    given[0] = np.nan if group.rank == 0 else 0
    averages = average(averager, given)
    assert np.isnan(averages[:CHUNK]).all()
    assert averages[CHUNK:].any()
    for _ in range(3):
        assert not average(averager, 0).any()


def case_residuals_of_reducers_arrive_after_the_step_counter_wraps(group: shoal.Group) -> None:
    """Reducers drop half of the largest values in step 2^14, and send the rest in the next."""
    averager = two_of_a_chunk(group)
    average(averager, 0)
    averager._departures.subject.step = (1 << 14) - 1
    given = np.zeros(CHUNK, np.float32)
    given[10 * group.rank :][:2] = 2.0
    got = average(averager, given).copy()
    assert np.count_nonzero(got) == 2
    got += average(averager, 0)
    assert got.tolist()[:12] == [1.0, 1.0, *[0.0] * 8, 1.0, 1.0]


def case_values_kept_back_of_an_array_that_no_rank_has_next_arrive_later(
    group: shoal.Group,
) -> None:
    """Reducers drop half of the largest values, before a step in which no rank has the array."""
    arrays = dict.fromkeys("ab", ((CHUNK // 2,), "float32"))
    scheme = ChunkTopK(share=2 / CHUNK)
    averager = Averager(group, arrays, compress=scheme, find_unused=True)
    for _ in range(2):
        averaged(averager, {"a": 0, "b": 0})
    given = np.zeros(CHUNK // 2, np.float32)
    given[10 * group.rank :][:2] = 2.0
    got = averaged(averager, {"a": 0, "b": given})["b"].copy()
    assert np.count_nonzero(got) == 2
    averaged(averager, {"a": 0})
    assert averager.unused == (1,)
    for _ in range(2):
        got += averaged(averager, {"a": 0, "b": 0})["b"]
    assert got.tolist()[:12] == [1.0, 1.0, *[0.0] * 8, 1.0, 1.0]


def case_no_value_of_steps_after_a_loaded_state_arrives_later(group: shoal.Group) -> None:
    """Load the state from before a step in which reducers dropped half of the largest values."""
    averager = two_of_a_chunk(group)
    for _ in range(2):
        average(averager, 0)
    state = averager.state_dict()
    given = np.zeros(CHUNK, np.float32)
    given[10 * group.rank :][:2] = 2.0
    assert average(averager, given).any()
    averager.load_state_dict(state)
    for _ in range(3):
        assert not average(averager, 0).any()


def case_the_256th_averager_is_refused_while_the_first_is_alive(group: shoal.Group) -> None:
    """Reducers would mix the values that they dropped for the two."""
    first = two_of_a_chunk(group)
    group.subjects._n += 254  # as after 254 other averagers
    with pytest.raises(Unsupported, match="the averager of 'a' has the same number"):
        two_of_a_chunk(group)
    average(first, 1)
    del first
    group.subjects._n += 254
    average(two_of_a_chunk(group), 1)


@on_ranks(2)
def test_each_case_of_two_ranks_passes() -> None:
    pretend_hosts(1)
    with shoal.init() as world:
        for name, case in globals().items():
            if name.startswith("case_"):
                world.barrier()
                case(world.subgroup(range(world.size), name))
