"""Every algorithm of every collective on NumPy arrays in real processes, against NumPy itself."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from process.arrays import (
    Array,
    Memory,
    check,
    filled,
    folded,
    inside_shared,
    private,
    shared,
    unaligned,
)
from process.ranks import run_ranks
from process.stage import pretend_hosts

import shoal
from shoal.dtypes import Op
from shoal.plan import Planner
from shoal.plan.settings import Forced
from shoal.schedule import ALGORITHMS

# By `find` alone.
BY_HOST = (
    *("sharded/ring", "ring/tree", "sharded/doubling", "halving/doubling", "tree/direct"),
    *("sharded(1)/halving", "sharded(1)", "sharded(2)"),
)

# A segment holds 32768 float32.
CALLS = (
    *((n_elems, "float32", Op.SUM) for n_elems in (0, 1, 7, 1009, 40_001)),
    (1009, "float64", Op.AVG),
    (1009, "uint8", Op.MAX),
    (1009, "complex64", Op.SUM),
    (1009, "int32", Op.AVG),
    (150_001, "int16", Op.BXOR),
    (300_007, "float32", Op.AVG),
)


def noise(n_elems: int, dtype: Any, *seed: int) -> Array:
    """Small integers, exact in every type, also when they are added up."""
    return np.random.default_rng(seed).integers(0, 9, n_elems).astype(dtype)


class Exchange:
    """One rank's side of one kind of call, by whatever algorithm the group is made to take."""

    def __init__(
        self, group: shoal.Group, n_elems: int, dtype: str, op: Op, root: int, memory: Memory
    ) -> None:
        self.group, self.n_elems, self.dtype, self.op, self.root = group, n_elems, dtype, op, root
        self.rank, self.size, self.memory = group.rank, group.size, memory
        self.is_root = group.rank == root

    def own(self, rank: int) -> Array:
        return noise(self.n_elems, self.dtype, rank)

    def block(self, source: int, to: int) -> Array:
        return noise(self.n_elems, self.dtype, source, to)

    def row(self, source: int) -> list[Array]:
        """What `source` has for every rank."""
        return [self.block(source, to) for to in range(self.size)]

    def take(self, values: Array) -> Array:
        return filled(self.memory, values)

    def empty(self, n_blocks: int = 1) -> Array:
        return filled(self.memory, np.full(n_blocks * self.n_elems, 7, self.dtype))

    def all_reduce(self) -> None:
        data = self.take(self.own(self.rank))
        self.group.all_reduce(data, self.op)
        check(data, folded([self.own(rank) for rank in range(self.size)], self.op))

    def broadcast(self) -> None:
        data = self.take(self.own(self.rank))
        self.group.broadcast(data, self.root)
        check(data, self.own(self.root))

    def reduce(self) -> None:
        data = self.take(self.own(self.rank))
        self.group.reduce(data, self.root, self.op)
        want = self.own(self.rank)
        if self.is_root:
            want = folded([self.own(rank) for rank in range(self.size)], self.op)
        check(data, want)

    def all_gather(self) -> None:
        want = [self.own(rank) for rank in range(self.size)]
        data, whole = self.take(want[self.rank]), self.empty(self.size)
        self.group.all_gather(whole, data)
        check(whole, np.concatenate(want))
        check(data, want[self.rank])
        parts = [self.empty() for _ in want]
        parts[self.rank][:] = want[self.rank]
        self.group.all_gather(parts, parts[self.rank])
        check(parts, want)

    def gather(self) -> None:
        want = [self.own(rank) for rank in range(self.size)]
        data, whole = self.take(want[self.rank]), self.empty(self.size)
        self.group.gather(whole if self.is_root else None, data, self.root)
        check(data, want[self.rank])
        if self.is_root:
            check(whole, np.concatenate(want))
        parts = [self.empty() for _ in want]
        parts[self.rank][:] = want[self.rank]
        self.group.gather(parts if self.is_root else None, parts[self.rank], self.root)
        if self.is_root:
            check(parts, want)

    def reduce_scatter(self) -> None:
        want = folded([self.block(rank, self.rank) for rank in range(self.size)], self.op)
        parts, output = [self.take(block) for block in self.row(self.rank)], self.empty()
        whole = self.take(np.concatenate(parts))
        self.group.reduce_scatter(output, whole, self.op)
        check(output, want)
        check(whole, np.concatenate(self.row(self.rank)))
        self.group.reduce_scatter(parts[self.rank], parts, self.op)
        check(parts[self.rank], want)

    def scatter(self) -> None:
        want, given = self.block(self.root, self.rank), self.row(self.root)
        whole, output = self.take(np.concatenate(given)), self.empty()
        self.group.scatter(output, whole if self.is_root else None, self.root)
        check(output, want)
        check(whole, np.concatenate(given))
        parts = [self.take(block) for block in given]
        parts[self.rank][:] = given[self.rank] if self.is_root else 7
        self.group.scatter(parts[self.rank], parts if self.is_root else None, self.root)
        check(parts[self.rank], want)

    def all_to_all(self) -> None:
        want = [self.block(source, self.rank) for source in range(self.size)]
        whole, output = self.take(np.concatenate(self.row(self.rank))), self.empty(self.size)
        self.group.all_to_all(output, whole)
        check(output, np.concatenate(want))
        check(whole, np.concatenate(self.row(self.rank)))

    def barrier(self) -> None:
        self.group.barrier()


def algorithms(size: int) -> Iterator[tuple[str, str]]:
    for collective, names in ALGORITHMS.items():
        for name in (*names, *(BY_HOST if collective == "all_reduce" else ())):
            if name != "sharded(2)" or size > 1:
                yield collective, name


def every_algorithm(ranks_per_host: int) -> list[str]:
    """What was tried: collective, algorithm, elements and type."""
    pretend_hosts(ranks_per_host)
    tried = []
    with shoal.init() as group:
        # Ranks may differ in where their arrays lie.
        mixed = shared if group.rank % 2 else private
        kinds = (private, shared, mixed, unaligned, inside_shared)
        for turn, (collective, name) in enumerate(algorithms(group.size)):
            group.plan_by(Planner(group.planner.cluster, Forced(name, name)))
            for at, (n_elems, dtype, op) in enumerate(CALLS):
                assert group.planner.choose(collective, n_elems).name == name
                memory = kinds[(at + turn) % len(kinds)]
                root = (0, group.size - 1, group.size // 2)[at % 3]
                call: Callable[[], None] = getattr(
                    Exchange(group, n_elems, dtype, op, root, memory), collective
                )
                try:
                    call()
                except Exception as error:
                    what = f"{collective} by {name}, {dtype}[{n_elems}], root {root}"
                    raise AssertionError(what) from error
                tried.append(f"{collective} {name} {n_elems} {dtype}")
    return tried


PLACES = [(1, 1), (2, 2), (3, 3), (5, 5), (2, 1), (4, 2), (5, 2), (5, 1)]
if os.environ.get("SHOAL_SOAK"):
    PLACES += [(4, 4), (3, 1), (8, 8), (8, 3)]


@pytest.mark.parametrize(("size", "ranks_per_host"), PLACES)
def test_every_algorithm_gives_numpys_answer(size: int, ranks_per_host: int) -> None:
    want = [f"{c} {name} {n} {dtype}" for c, name in algorithms(size) for n, dtype, _ in CALLS]
    assert run_ranks(every_algorithm, size, ranks_per_host) == size * [want]


# Blocks of different length.


def lengths_of(size: int, seed: int) -> list[int]:
    """Elements of each rank's block; the first kinds have empty ones."""
    kinds: list[list[int]] = [
        [0] * size,
        [0] * (size - 1) + [5],
        [1009 * (rank % 2) for rank in range(size)],
        [70_001 * (rank % 3 == 1) + rank for rank in range(size)],
    ]
    return kinds[seed] if seed < len(kinds) else random_lengths(seed, size)


def random_lengths(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).choice([0, 0, 1, 3, 1009, 40_001], n)]


def uneven_blocks(ranks_per_host: int) -> int:
    pretend_hosts(ranks_per_host)
    n_checked = 0
    with shoal.init() as group:
        rank, size = group.rank, group.size
        for name in ("direct", "ring", "bruck"):
            # Without a warning where an algorithm cannot do it: another one does.
            group.plan_by(Planner(group.planner.cluster, Forced(name, name)))
            for seed in range(8):
                memory = (private, shared, shared if rank % 2 else private)[seed % 3]
                lengths = lengths_of(size, seed)
                gather_unevenly(group, lengths, memory)
                scatter_unevenly(group, lengths, memory)
                n_checked += 1
    return n_checked


def gather_unevenly(group: shoal.Group, lengths: list[int], memory: Memory) -> None:
    want = [noise(n, np.float32, rank) for rank, n in enumerate(lengths)]
    outputs = [filled(memory, np.full(n, -1, np.float32)) for n in lengths]
    group.all_gather(outputs, filled(memory, want[group.rank]))
    for found, wanted in zip(outputs, want, strict=True):
        check(found, wanted)


def scatter_unevenly(group: shoal.Group, lengths: list[int], memory: Memory) -> None:
    every = [
        [noise(n, np.int64, source, to) for to, n in enumerate(lengths)]
        for source in range(group.size)
    ]
    inputs = [filled(memory, block) for block in every[group.rank]]
    want = folded([row[group.rank] for row in every], Op.SUM)
    output = filled(memory, np.full(lengths[group.rank], -1, np.int64))
    group.reduce_scatter(output, inputs)
    check(output, want)
    group.reduce_scatter(inputs[group.rank], inputs)
    check(inputs[group.rank], want)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (4, 4), (2, 1), (3, 1), (5, 2)])
def test_blocks_of_different_length_are_gathered_and_scattered(
    size: int, ranks_per_host: int
) -> None:
    assert run_ranks(uneven_blocks, size, ranks_per_host) == [24] * size


def exchange_unevenly(ranks_per_host: int) -> int:
    """With lengths that only two ranks know, several calls in flight at once."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        rank, size, pending = group.rank, group.size, []
        for seed in range(24):
            lengths = np.reshape(random_lengths(seed, size * size), (size, size))
            memory = (private, shared, shared if rank % 2 else private)[seed % 3]
            sent = [noise(int(n), np.float32, seed, rank, to) for to, n in enumerate(lengths[rank])]
            want = [
                noise(int(n), np.float32, seed, source, rank)
                for source, n in enumerate(lengths[:, rank])
            ]
            inputs = [filled(memory, block) for block in sent]
            outputs = [filled(memory, np.full(block.size, -1, np.float32)) for block in want]
            if seed % 4 == 1:
                outputs[rank] = inputs[rank]
            work = group.all_to_all(outputs, inputs, async_op=seed % 2 == 0, work=True)
            pending.append((work, outputs, want, inputs, sent))
        for work, outputs, want, inputs, sent in pending:
            assert work is not None
            work.wait()
            for found, wanted in zip((*outputs, *inputs), (*want, *sent), strict=True):
                check(found, wanted)
        return len(pending)


def exchange_wholes_and_lists(ranks_per_host: int) -> float:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        inputs = np.arange(group.size, dtype=np.float32) + 10 * group.rank
        outputs = np.empty(group.size, np.float32)
        if group.rank == 0:
            group.all_to_all(outputs, inputs)
        else:
            group.all_to_all([*np.split(outputs, group.size)], [*np.split(inputs, group.size)])
        check(outputs, 10 * np.arange(group.size, dtype=np.float32) + group.rank)
        return float(outputs[-1])


def test_ranks_that_give_lists_exchange_with_one_that_gives_a_whole() -> None:
    """The hosts differ in size, where the model takes other algorithms for cheap."""
    assert run_ranks(exchange_wholes_and_lists, 3, 2) == [20, 21, 22]


@pytest.mark.parametrize(("size", "ranks_per_host"), [(1, 1), (2, 2), (5, 5), (3, 1), (4, 2)])
def test_blocks_whose_lengths_only_two_ranks_know_are_exchanged(
    size: int, ranks_per_host: int
) -> None:
    assert run_ranks(exchange_unevenly, size, ranks_per_host) == [24] * size
