"""Sharding by weights, with servers, keeps the order of `fold_orders`: part of a grid of sizes is
proved, and all of it with `SHOAL_SOAK=1`, as in `make test-soak`."""

import itertools
import os
import random
from collections.abc import Iterator

import pytest
from contract.fold_orders import FLOOR_BYTES, nested, order_of, stripes

from shoal.analysis.prove.prover import prove
from shoal.dtypes import DType, Op
from shoal.schedule import Algorithm, Buffer, Place, find
from shoal.schedule.counts import count
from shoal.schedule.weights import Weights
from shoal.shapes import Shape, layouts_of

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_WORKERS = range(1, 17)
N_SERVERS = range(21)
N_SAMPLED = 4  # weights per number of workers, from about 100
FLOOR_ELEMS = FLOOR_BYTES // 4


def weights_of(n: int, k: int) -> Iterator[Weights]:
    """Yield weights of n workers and k servers: equal, unequal, and with zeros."""
    chance = random.Random(n * 1000 + k)
    yield Weights((1,) * n, (3,) * k)
    if k:
        yield Weights((0,) * n, (1,) * k)
    yield Weights(*(tuple(chance.randint(1, 99) for _ in range(m)) for m in (n, k)))
    some = Weights(*(tuple(chance.choice((0, 0, 1, 7, 900)) for _ in range(m)) for m in (n, k)))
    if some.total:
        yield some
    yield Weights((*(0 for _ in range(n - 1)), 1), (0,) * k)


GRID = [list(itertools.chain.from_iterable(weights_of(n, k) for k in N_SERVERS)) for n in N_WORKERS]


def stripe_of(algorithm: Algorithm, n_bytes: int, size: int, n_workers: int) -> list[int]:
    """Return the stripe of every chunk, by its place alone."""
    cuts = [where for where, _ in stripes(n_bytes, 1, n_workers)]
    found = []
    for begin, length in zip(*algorithm.cut_rule(n_bytes, size), strict=True):
        (within,) = [t for t, cut in enumerate(cuts) if cut.start <= begin < cut.stop]
        assert begin + length <= cuts[within].stop
        found.append(within)
    return found


@pytest.mark.parametrize("grid", GRID, ids=lambda grid: f"{len(grid[0].workers)} workers")
def test_all_weights_keep_the_contract_in_the_order_of_stripes(grid: list[Weights]) -> None:
    n = len(grid[0].workers)
    for weights in grid if SOAK else random.Random(n).sample(grid, N_SAMPLED):
        size = n + len(weights.servers)
        for part in ("", *weights.parts):
            ranks = n if part == "workers" else size
            for n_stripes in {n, (n + 1) // 2}:
                # Long enough that no chunk is empty: the place of each shows its stripe.
                n_bytes = n_stripes * FLOOR_BYTES if n_stripes < n else n * FLOOR_BYTES * 1000
                algorithm = find("all_reduce", weights.name(part)).fitted(n_bytes, ranks)
                proof = prove("all_reduce", algorithm, ranks, n_segments=1, window=0)
                if n_stripes < n:
                    continue
                found = stripe_of(algorithm, n_bytes, ranks, n)
                for chunk, stripe in enumerate(found):
                    want = nested(order_of(stripe, n, n))
                    for rank in range(n):
                        assert proof.expressions[rank, Place(Buffer.DATA, chunk)] == want
                # Each contribution goes to its reducer once, and each result to each worker once.
                owners = [algorithm.owner_rule(chunk, ranks) for chunk in range(len(found))]
                once = sum(n - (owner < n) for owner in owners)
                assert sum(proof.n_sent.values()) == 2 * once


@pytest.mark.parametrize("window", [0, 1, 3])
def test_segments_staged_early_do_not_change_the_result(window: int) -> None:
    for name, size in (("sharded[5*2|3*7]", 8), ("sharded[4*0|6*1]", 10), ("sharded[3,0,9|]", 3)):
        prove("all_reduce", name, size, n_segments=3, window=window)


def shape_of(name: str, n_elems: int, rank: int, size: int, dtype: DType = DType.FLOAT32) -> Shape:
    return Shape("all_reduce", name, dtype, Op.SUM, n_elems, rank, size)


def places(name: str, n_elems: int, size: int, dtype: DType) -> list[tuple[int, int]]:
    begins, lengths = layouts_of(shape_of(name, n_elems, 0, size, dtype))[Buffer.DATA]
    return [(begin, begin + n) for begin, n in zip(begins, lengths, strict=True) if n]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16])
def test_both_parts_cover_the_buffer_in_complete_cache_lines(n: int) -> None:
    for k in (0, 1, 3, 8, 20):
        for weights in weights_of(n, k):
            for n_elems in (0, 1, 15, 1009, 5 * FLOOR_ELEMS + 7, n * FLOOR_ELEMS * 3 + 13):
                for dtype in (DType.FLOAT32, DType.INT8, DType.FLOAT64):
                    whole = places(weights.name(), n_elems, n + k, dtype)
                    parts = [
                        places(weights.name(part), n_elems, n + k * (part == "servers"), dtype)
                        for part in weights.parts
                    ]
                    assert sorted(itertools.chain.from_iterable(parts)) == whole
                    ends = [0, *(end for _, end in whole)]
                    assert [begin for begin, _ in whole] == ends[:-1]
                    assert ends[-1] == n_elems * dtype.n_bytes
                    assert all(begin % 64 == 0 for begin, _ in whole)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16])
def test_shares_of_a_long_buffer_equal_the_weights(n: int) -> None:
    n_bytes = 64 << 20
    for k in (0, 1, 3, 8, 20):
        for weights in weights_of(n, k):
            size = n + k
            algorithm = find("all_reduce", weights.name()).fitted(n_bytes, size)
            has = [0] * size
            for chunk, length in enumerate(algorithm.cut_rule(n_bytes, size)[1]):
                has[algorithm.owner_rule(chunk, size)] += length
            for n_held, weight in zip(has, (*weights.workers, *weights.servers), strict=True):
                assert abs(n_held - n_bytes * weight / weights.total) <= 64 * 2 * n


def test_a_server_has_scratch_for_its_chunks_and_no_data_and_no_part_in_an_average() -> None:
    for rank in (4, 5):
        *callers, scratch = layouts_of(shape_of("sharded[4*1|2*2]", 1 << 20, rank, 6))
        assert callers == [([], [])] * 3
        assert sum(scratch[1]) == 4 * (1 << 20) * 2 // 8
    for name, size in (("sharded[4*1|2*2]", 6), ("sharded[4*1|2*2].workers", 4), ("sharded", 4)):
        assert shape_of(name, 100, 0, size).n_workers == 4


def test_equal_weights_of_workers_alone_give_the_plain_sharded_all_reduce() -> None:
    for n in N_WORKERS:
        plain, weighted = find("all_reduce", "sharded"), find("all_reduce", f"sharded[{n}*1|]")
        for n_elems in (n * FLOOR_ELEMS, n * FLOOR_ELEMS + 1009):
            shapes = [shape_of(name, n_elems, 0, n) for name in ("sharded", f"sharded[{n}*1|]")]
            assert layouts_of(shapes[0])[0] == layouts_of(shapes[1])[0]
        for rank in range(n):
            assert list(plain.steps(rank, n)) == list(weighted.steps(rank, n))
        assert count(plain, tuple(range(n))) == count(weighted, tuple(range(n)))


def test_workers_that_fold_nothing_begin_with_different_servers() -> None:
    for n, k in ((8, 8), (8, 4), (8, 16), (6, 3), (4, 12)):
        algorithm = find("all_reduce", f"sharded[{n}*0|{k}*1]")
        begins = [next(iter(algorithm.steps(rank, n + k))).peer for rank in range(n)]
        assert len(set(begins)) == min(n, k)
