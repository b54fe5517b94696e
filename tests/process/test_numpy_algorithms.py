"""Every collective, by every algorithm, on NumPy arrays in real processes, against NumPy itself."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from process import arrays
from process.arrays import DTYPES, Array, Memory, check, exists, filled, folded, private, shared
from process.ranks import on_ranks
from process.stage import pretend_hosts

import shoal
from shoal.dtypes import Op
from shoal.plan import Planner
from shoal.plan.settings import Forced
from shoal.schedule import ALGORITHMS

SOAK = bool(os.environ.get("SHOAL_SOAK"))

# Names that only `find` accepts.
BY_HOST = ["sharded/ring", "ring/tree", "sharded/doubling", "halving/doubling", "tree/direct"]
BY_HOST += ["sharded/halving"]
PLANNED = "planned"  # as the planner chooses

# Lengths of a rank's buffer: of all its blocks where a rank has several. A segment holds 32768
# float32.
CALLS = (
    *((n_elems, "float32", Op.SUM) for n_elems in (0, 1, 40_001)),
    (1009, "float64", Op.AVG),
    (1009, "uint8", Op.MAX),
    (150_001, "int16", Op.BXOR),
    (300_007, "float32", Op.AVG),
)
BY_BLOCK = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
# A buffer or block of 2.06 MiB, which is cut where there are channels, and fills the six slots of a
# peer several times.
LARGE = (540_011, "float32", Op.SUM)


def noise(n_elems: int, dtype: Any, *seed: int) -> Array:
    """Return small integers, whose sums are exact in every type."""
    return np.resize(pattern(np.dtype(dtype), *seed), n_elems)


@functools.cache
def pattern(dtype: np.dtype[Any], *seed: int) -> Array:
    # The length is a prime, so that no two pieces of a message are equal.
    return np.random.default_rng(seed).integers(0, 9, 4999).astype(dtype)


class Exchange:
    """One rank's side of one kind of call, by the algorithm the group's planner chooses."""

    def __init__(
        self, group: shoal.Group, n_elems: int, dtype: str, op: Op, root: int, memory: Memory
    ) -> None:
        self.group, self.n_elems, self.dtype, self.op, self.root = group, n_elems, dtype, op, root
        self.rank, self.size, self.memory = group.rank, group.size, memory
        self.is_root = group.rank == root

    def own(self, rank: int) -> Array:
        return noise(self.n_elems, self.dtype, rank)

    def row(self, source: int) -> list[Array]:
        """What `source` sends to every rank."""
        return [noise(self.n_elems, self.dtype, source, to) for to in range(self.size)]

    def column(self, to: int) -> list[Array]:
        """What every rank sends to `to`."""
        return [noise(self.n_elems, self.dtype, source, to) for source in range(self.size)]

    def take(self, values: Array) -> Array:
        return filled(self.memory, values)

    def empty(self, n_blocks: int = 1) -> Array:
        return filled(self.memory, np.full(n_blocks * self.n_elems, 7, self.dtype))

    def all_reduce(self) -> None:
        data = self.take(self.own(self.rank))
        assert self.group.all_reduce(data, self.op) is None
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
        whole[:] = 7
        mine = whole[self.rank * self.n_elems :][: self.n_elems]
        mine[:] = want[self.rank]
        self.group.all_gather(whole, mine)
        check(whole, np.concatenate(want))

    def gather(self) -> None:
        want = [self.own(rank) for rank in range(self.size)]
        data, whole = self.take(want[self.rank]), self.empty(self.size)
        self.group.gather(whole if self.is_root else None, data, self.root)
        check(data, want[self.rank])
        parts = [self.empty() for _ in want]
        parts[self.rank][:] = want[self.rank]
        self.group.gather(parts if self.is_root else None, parts[self.rank], self.root)
        if self.is_root:
            check(whole, np.concatenate(want))
            check(parts, want)

    def reduce_scatter(self) -> None:
        want = folded(self.column(self.rank), self.op)
        parts, output = [self.take(block) for block in self.row(self.rank)], self.empty()
        whole = self.take(np.concatenate(parts))
        self.group.reduce_scatter(output, whole, self.op)
        check(output, want)
        check(whole, np.concatenate(self.row(self.rank)))
        self.group.reduce_scatter(parts[self.rank], parts, self.op)
        check(parts[self.rank], want)

    def scatter(self) -> None:
        given = self.row(self.root)
        whole, output = self.take(np.concatenate(given)), self.empty()
        self.group.scatter(output, whole if self.is_root else None, self.root)
        check(output, given[self.rank])
        check(whole, np.concatenate(given))
        parts = [self.take(block) for block in given]
        parts[self.rank][:] = given[self.rank] if self.is_root else 7
        self.group.scatter(parts[self.rank], parts if self.is_root else None, self.root)
        check(parts[self.rank], given[self.rank])

    def all_to_all(self) -> None:
        given = np.concatenate(self.row(self.rank))
        whole, output = self.take(given), self.empty(self.size)
        self.group.all_to_all(output, whole)
        check(output, np.concatenate(self.column(self.rank)))
        check(whole, given)

    def barrier(self) -> None:
        self.group.barrier()


def algorithms() -> Iterator[tuple[str, str]]:
    for collective, names in ALGORITHMS.items():
        for name in (PLANNED, *names, *(BY_HOST if collective == "all_reduce" else ())):
            yield collective, name


def exchanges(size: int, only_planned: bool) -> list[tuple[str, str, tuple[int, str, Op]]]:
    found: list[tuple[str, str, tuple[int, str, Op]]] = []
    for collective, name in algorithms():
        if name != PLANNED and only_planned:
            continue
        n_blocks = size if collective in BY_BLOCK else 1
        found += [(collective, name, (math.ceil(n / n_blocks), *how)) for n, *how in CALLS]
        if name == PLANNED and size < 8:
            found.append((collective, name, LARGE))
    return found


def exchange_everything(ranks_per_host: int, only_planned: bool) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        planner = group.planner
        # The placement of arrays may differ between ranks.
        mixed = shared if group.rank % 2 else private
        kinds = (private, shared, mixed, arrays.unaligned, arrays.inside_shared)
        todo = enumerate(exchanges(group.size, only_planned))
        for turn, (collective, name, (n_elems, dtype, op)) in todo:
            if name != PLANNED:
                group.plan_by(Planner(planner.cluster, Forced(name, name)))
                assert group.planner.choose(collective, n_elems).name == name
            root = (0, group.size - 1, group.size // 2)[turn % 3]
            memory = kinds[turn % len(kinds)]
            exchange = Exchange(group, n_elems, dtype, op, root, memory)
            call: Callable[[], None] = getattr(exchange, collective)
            try:
                call()
            except Exception as error:
                what = f"{collective} by {name}, {dtype}[{n_elems}], root {root}"
                raise AssertionError(what) from error
            group.plan_by(planner)


# Size, ranks per host, and True if only the planner's choice is tried.
PLACES = [(1, 1, False), (2, 1, False), (3, 3, False), (4, 2, False), (5, 2, False)]
PLACES += [(8, 8, True), (3, 1, True)]  # more ranks than cores, and only TCP
if SOAK:
    PLACES += [
        (size, ranks_per_host, False)
        for size, ranks_per_host in ((2, 2), (3, 1), (4, 4), (5, 1), (5, 5), (8, 3), (8, 8))
    ]


@pytest.mark.parametrize(("size", "ranks_per_host", "only_planned"), PLACES)
@on_ranks()
def test_every_algorithm_gives_the_result_of_numpy(
    size: int, ranks_per_host: int, only_planned: bool
) -> None:
    exchange_everything(ranks_per_host, only_planned)


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", "::1"), ("SHOAL_CHANNELS", "3")])
@on_ranks(2)
def test_results_are_numpys_over_ipv6_and_channels(name: str, value: str) -> None:
    os.environ[name] = value
    exchange_everything(1, True)


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_every_operation_on_every_type_agrees_with_numpy(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    n_checked = 0
    with shoal.init() as group:
        for n_elems in (257, 40_007):
            for dtype in DTYPES:
                kind = arrays.numpy_type(dtype)
                blocks = [arrays.contribution(rank, n_elems, kind) for rank in range(group.size)]
                for op in filter(functools.partial(exists, dtype), Op):
                    memory = shared if n_checked % 2 else private
                    data = filled(memory, blocks[group.rank])
                    group.all_reduce(data, op if n_checked % 3 else str(op))
                    check(data, folded(blocks, op), f"{op} of {dtype}")
                    n_checked += 1


def digests() -> list[str]:
    """Return digests of sums and averages of random numbers, where the order matters."""
    found = []
    with shoal.init() as group:
        random = np.random.default_rng([7, group.rank])
        for n_elems in (5, 3001, 100_003):
            for dtype in ("float32", "float16", "complex64"):
                values = random.standard_normal(n_elems).astype(dtype)
                for op, memory in (("sum", private), ("avg", shared)):
                    data = filled(memory, values)
                    group.all_reduce(data, op)
                    found.append(arrays.digest(data))
    return found


@pytest.mark.parametrize("ranks_per_host", [4, 2])
@on_ranks(4)
def test_floating_sums_have_the_same_bits_on_all_ranks_and_in_every_group(
    ranks_per_host: int,
) -> list[str]:
    pretend_hosts(ranks_per_host)
    first = digests()
    assert digests() == first
    return first


def random_lengths(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).choice([0, 0, 1, 3, 1009, 40_001], n)]


# For two hosts of different sizes the cost model prefers other algorithms.
@pytest.mark.parametrize(("size", "ranks_per_host"), [(1, 1), (2, 2), (4, 4), (3, 1), (5, 2)])
@on_ranks()
def test_uneven_blocks_are_gathered_scattered_and_exchanged(size: int, ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        rank, planner = group.rank, group.planner
        memories = (private, shared, shared if rank % 2 else private)
        lengths_of_ranks = [
            [0] * size,
            [0] * (size - 1) + [5],
            [1009 * (each % 2) for each in range(size)],
            [70_001 * (each % 3 == 1) + each for each in range(size)],
            *(random_lengths(seed, size) for seed in range(4, 8)),
        ]
        for name in ("direct", "ring", "bruck"):
            # No warning where an algorithm cannot do it: another one does.
            group.plan_by(Planner(planner.cluster, Forced(name, name)))
            for seed, lengths in enumerate(lengths_of_ranks):
                gather_unevenly(group, lengths, memories[seed % 3])
                scatter_unevenly(group, lengths, memories[seed % 3])
        group.plan_by(planner)
        exchange_unevenly(group, memories)
        exchange_wholes_and_lists(group)


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


def exchange_unevenly(group: shoal.Group, memories: tuple[Memory, ...]) -> None:
    """Make several calls at once, with lengths that only two ranks know."""
    rank, size, pending = group.rank, group.size, []
    for seed in range(24):
        lengths = np.reshape(random_lengths(seed, size * size), (size, size))
        memory = memories[seed % 3]
        sent = [noise(int(n), np.float32, rank, to) for to, n in enumerate(lengths[rank])]
        want = [noise(int(n), np.float32, by, rank) for by, n in enumerate(lengths[:, rank])]
        inputs = [filled(memory, block) for block in sent]
        outputs = [filled(memory, np.full(block.size, -1, np.float32)) for block in want]
        if seed % 4 == 1:
            outputs[rank] = inputs[rank]
        work = group.all_to_all(outputs, inputs, async_op=seed % 2 == 0, work=True)
        pending.append((work, (*outputs, *inputs), (*want, *sent)))
    for work, buffers, values in pending:
        work.wait()
        for found, wanted in zip(buffers, values, strict=True):
            check(found, wanted)


def exchange_wholes_and_lists(group: shoal.Group) -> None:
    """Rank 0 passes one buffer, and the others pass lists of equal blocks."""
    inputs = np.arange(group.size, dtype=np.float32) + 10 * group.rank
    outputs = np.empty(group.size, np.float32)
    if group.rank == 0:
        group.all_to_all(outputs, inputs)
    else:
        group.all_to_all([*np.split(outputs, group.size)], [*np.split(inputs, group.size)])
    check(outputs, 10 * np.arange(group.size, dtype=np.float32) + group.rank)
