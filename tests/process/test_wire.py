"""A narrow wire in real processes: half the digits between hosts, the same bits on every rank."""

import functools
import itertools
import logging
import os
from typing import Any

import numpy as np
import pytest
from process.arrays import Array, check, contribution, digest
from process.ranks import on_ranks
from process.stage import Lines, pretend_hosts
from wires import ERRORS, NARROW, block_of, bound_of_sum, rounded

import shoal
from shoal.dtypes import Op
from shoal.plan import Planner
from shoal.plan.settings import Forced

LENGTHS = (0, 1, 7, 1009, 150_001)  # a segment holds 32768
ALGORITHMS = ("sharded", "fairring", "ring/sharded", "tree/sharded")


@functools.cache
def noise(rank: int, n_elems: int) -> Array:
    """Return read-only values of many magnitudes and both signs, with some zeros."""
    random = np.random.default_rng(rank)
    values = np.float32(random.normal(size=n_elems) * 2.0 ** random.integers(-20, 11, n_elems))
    values[random.random(n_elems) < 0.05] = 0
    values.flags.writeable = False
    return values


@functools.cache
def rounded_noise(wire: str, rank: int, n_elems: int) -> Array:
    return rounded(wire, noise(rank, n_elems))


def is_rounded(wire: str, values: Array) -> bool:
    return values.tobytes() == rounded(wire, values).tobytes()


def check_sum(
    wire: str, found: Array, every: list[Array], n_roundings: int, op: Op, subject: int = 0
) -> None:
    """`found` is as near to the sum in float64 as the docs promise."""
    exact = np.add.reduce(every, dtype=np.float64)
    divisor = len(every) if op is Op.AVG else 1
    bound = bound_of_sum(wire, every, n_roundings, divisor=divisor, at_random=subject > 0)
    assert np.all(np.abs(found - exact / divisor) <= bound), wire


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 1), (4, 1), (5, 2)])
@on_ranks()
def test_all_ranks_get_the_same_bits_and_they_are_near_the_sum(
    size: int, ranks_per_host: int
) -> list[str]:
    """Rank 0 compares the results with the truth."""
    pretend_hosts(ranks_per_host)
    digests = []
    with shoal.init() as group:
        spans_hosts, ranks = size > ranks_per_host, range(size)
        for name, wire, n_elems in itertools.product(ALGORITHMS, NARROW, LENGTHS):
            group.plan_by(Planner(group.planner.cluster, Forced(name, name)))
            every = [noise(rank, n_elems) for rank in ranks]
            for op, subject in ((Op.SUM, 0), (Op.AVG, 0), (Op.SUM, 1 << 24)):
                found = every[group.rank].copy()
                group.all_reduce(found, op, wire=wire, subject=subject)
                digests.append(digest(found))
                if group.rank == 0:
                    n_roundings = 2 if spans_hosts else 0
                    check_sum(wire, found, every, n_roundings, op, subject)
                    assert is_rounded(wire, found) or not spans_hosts or subject
            # Values that need no rounding are exact.
            if wire in ("bf16", "fp16"):
                exact = [contribution(rank, n_elems) for rank in ranks]
                found = exact[group.rank].copy()
                group.all_reduce(found, wire=wire)
                check(found, np.add.reduce(exact))
    return digests


@on_ranks(3)
def test_nothing_is_rounded_inside_a_host_by_any_algorithm() -> None:
    pretend_hosts(3)
    with shoal.init() as group:
        for name in ("direct", "ring", "sharded", "doubling"):
            group.plan_by(Planner(group.planner.cluster, Forced(name, name)))
            for n_elems in LENGTHS:
                wide, narrow = (noise(group.rank, n_elems).copy() for _ in range(2))
                group.all_reduce(wide)
                group.all_reduce(narrow, wire="bf16")
                check(narrow, wide)


@on_ranks(4)
def test_a_reduce_scatter_rounds_each_contribution_and_not_the_result() -> None:
    pretend_hosts(2)
    with shoal.init() as group:
        for n_elems in LENGTHS:
            every = [noise(rank, group.size * n_elems) for rank in range(group.size)]
            blocks = [np.split(whole, group.size)[group.rank] for whole in every]
            for wire, op in itertools.product(NARROW, (Op.SUM, Op.AVG)):
                output = np.full(n_elems, 7, np.float32)
                group.reduce_scatter(output, every[group.rank], op, wire=wire)
                check_sum(wire, output, blocks, 1, op)
                # The result does not travel, so it is not rounded.
                assert n_elems < 1000 or not is_rounded(wire, output)
        lengths = [40_001 * (rank % 2) + rank for rank in range(group.size)]
        row = [[noise(10 * source + to, n) for to, n in enumerate(lengths)] for source in range(4)]
        for wire in NARROW:
            output = np.empty(lengths[group.rank], np.float32)
            group.reduce_scatter(output, row[group.rank], wire=wire)
            check_sum(wire, output, [blocks[group.rank] for blocks in row], 1, Op.SUM)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(3, 1), (4, 2), (2, 2)])
@on_ranks()
def test_any_all_gather_gives_all_ranks_the_rounded_blocks(size: int, ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        spans_hosts, ranks = group.size > ranks_per_host, range(group.size)
        for name, wire in itertools.product(("direct", "ring", "bruck"), (*NARROW, "identity")):
            group.plan_by(Planner(group.planner.cluster, Forced(name, name)))
            for n_elems in LENGTHS:
                blocks = [noise(rank, n_elems) for rank in ranks]
                wanted = [rounded_noise(wire, r, n_elems) for r in ranks] if spans_hosts else blocks
                outputs = np.full(group.size * n_elems, 7, np.float32)
                group.all_gather(outputs, blocks[group.rank], wire=wire)
                check(outputs, np.concatenate(wanted))
                own = np.split(outputs, group.size)[group.rank]
                own[...] = blocks[group.rank]
                group.all_gather(outputs, own, wire=wire)
                check(outputs, np.concatenate(wanted))
            uneven = [noise(rank, 5_001 * (rank % 2) + rank) for rank in ranks]
            places = [np.empty_like(block) for block in uneven]
            group.all_gather(places, uneven[group.rank], wire=wire)
            for place, block in zip(places, uneven, strict=True):
                check(place, rounded(wire, block) if spans_hosts else block)


@on_ranks(3)
def test_only_a_block_with_a_non_finite_value_arrives_as_nan() -> list[str]:
    """Sum infinities, NaN, zeros, huge and tiny numbers."""
    pretend_hosts(1)
    digests = []
    with shoal.init() as group:
        for wire in NARROW:
            data = np.zeros(1000, np.float32)
            data[:32] = 2.0 ** (20 * group.rank - 40)
            data[100] = (np.inf, np.nan, -np.inf)[group.rank]
            data[200:300] = 1e-42  # denormals
            data[320:352] = -3e38 / group.size
            data[999] = group.rank
            group.all_reduce(data, wire=wire, subject=1 << 24)
            near = slice(96, 128) if block_of(wire) > 1 else slice(100, 101)
            assert np.isnan(data[near]).all(), wire
            others = np.delete(data, np.r_[near, 320:352])
            assert np.isfinite(others).all(), wire
            assert not data[352:960].any(), wire
            digests.append(digest(data))
    return digests


@pytest.mark.parametrize("wires", [("bf16", None), ("mxfp4", "mxfp8"), ("mxint8", "mxfp8")])
@on_ranks(2)
def test_ranks_that_ask_for_different_wires_get_an_error(wires: tuple[str | None, ...]) -> None:
    pretend_hosts(1)
    with shoal.init() as group, pytest.raises(shoal.UsageError) as refused:
        group.all_reduce(np.ones(1000, np.float32), wire=wires[group.rank])
    assert all(f"in {wire} between hosts" in str(refused.value) for wire in wires if wire)
    assert "rank 0" in str(refused.value)
    assert "rank 1" in str(refused.value)


CANNOT_BE_NARROW = [("float64", Op.SUM), ("int32", Op.SUM), ("float32", Op.MAX)]


@on_ranks(2)
def test_a_call_that_cannot_be_narrow_is_refused_before_data_moves() -> None:
    pretend_hosts(1)
    with shoal.init() as group:
        for (dtype, op), wire in itertools.product(CANNOT_BE_NARROW, NARROW):
            data = np.ones(100_000, dtype)
            with pytest.raises(shoal.UsageError, match=wire):
                group.all_reduce(data, op, wire=wire)
            check(data, np.ones_like(data))
        with pytest.raises(shoal.UsageError, match="mxfp8"):
            group.all_gather(np.ones(4, np.int32), np.ones(2, np.int32), wire="mxfp8")
        with pytest.raises(shoal.UsageError, match=r"'fp4'.*identity, bf16"):
            group.all_reduce(np.ones(1, np.float32), wire="fp4")
        with pytest.raises(TypeError, match="wire"):
            group.broadcast(np.ones(1, np.float32), wire="bf16")
        group.plan_by(Planner(group.planner.cluster, Forced("ring", "ring")))
        with pytest.raises(shoal.UsageError, match="every hop"):
            group.all_reduce(np.ones(1, np.float32), wire="bf16")
        # No other rank has noticed these calls.
        data = np.full(100_000, 257, np.float32)
        group.all_reduce(data)
        check(data, np.full(100_000, 514, np.float32))


@pytest.mark.parametrize("how", ["init", "subgroup", "SHOAL_WIRE"])
@on_ranks(2)
def test_a_groups_wire_applies_to_large_sums_and_other_calls_stay_wide(how: str) -> None:
    """Sum to 257, which bfloat16 cannot hold, in different groups, sizes and kinds of call."""
    pretend_hosts(1)
    if how == "SHOAL_WIRE":
        os.environ["SHOAL_WIRE"] = "bf16"
    with shoal.init(wire="bf16" if how == "init" else None) as world:
        group = world.subgroup([0, 1], "narrow", wire="bf16") if how == "subgroup" else world
        wide = world.subgroup([0, 1], "wide", wire="identity")
        below = world.subgroup([1, 0], "below") if how != "subgroup" else group

        def summed(by: shoal.Group, n_elems: int, dtype: Any = np.float32, **more: Any) -> float:
            data = np.full(n_elems, 257, dtype)
            by.all_reduce(data, **more)
            assert np.all(data == data[0])
            return float(data[0])

        for dtype, op in CANNOT_BE_NARROW:
            data = np.ones(100_000, dtype)
            group.all_reduce(data, op)
            assert np.all(data == (1 if op is Op.MAX else 2))
        # 256 from the other rank plus this rank's 257 is 513, which bfloat16 rounds to 512.
        assert summed(group, 16_384) == 512
        assert summed(below, 16_384) == 512
        assert summed(group, 16_383) == 514  # below 64 KiB
        assert summed(group, 16_383, wire="bf16") == 512
        assert summed(group, 16_384, wire="identity") == 514
        assert summed(wide, 16_384) == 514
        assert summed(group, 16_384, np.float64) == 514


@pytest.mark.parametrize("wire", NARROW)
@on_ranks(2)
def test_a_block_wire_warns_once_of_a_sum_outside_an_averager(wire: str) -> None:
    pretend_hosts(1)
    texts = Lines(logging.WARNING, "for gradients").texts
    with shoal.init(wire=wire) as group:
        group.all_reduce(np.ones(20_000, np.float32), subject=1 << 24)
        group.all_reduce(np.ones(20_001, np.float32), wire="identity")
        group.all_reduce(np.ones(20_002, np.float32), wire=wire)
        group.all_reduce(np.ones(10, np.float32))
        assert not texts
        group.all_reduce(np.ones(20_003, np.float32))
        group.all_reduce(np.ones(20_004, np.float32))
    assert len(texts) == (block_of(wire) > 1 and group.rank == 0)
    assert all(wire in line and f"{ERRORS[wire]:g}" in line for line in texts)
