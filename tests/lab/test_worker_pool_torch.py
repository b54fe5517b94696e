"""Ranks of torch.distributed under the benchmark: collectives are right, groups form again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.elements import OPERATIONS
from shoal.bench.job import JobSpec
from shoal.bench.launch import Placement
from shoal.bench.worker_pool import WorkerPool

HERE = Placement(program="bench.scoreboard.worker")


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[str], WorkerPool]]:
    """Start, once, two ranks of a library as forks of a process that has imported torch."""
    with ExitStack() as on_exit, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.bench.launch._FORKED_FROM", 2)
        yield cache(lambda name: on_exit.enter_context(WorkerPool(JobSpec(name, 2), HERE)))


@pytest.fixture(params=["gloo", "shoal"])
def pool(request: pytest.FixtureRequest, pool_of: Callable[[str], WorkerPool]) -> WorkerPool:
    return pool_of(request.param)


def test_every_collective_is_right_and_is_timed(pool: WorkerPool) -> None:
    for collective in (*COLLECTIVES, "buckets"):
        what = {"n_bytes": 4096, "collective": collective}
        assert pool.ask("check", **what) == [{"n_wrong": 0}, {"n_wrong": 0}], collective
        if collective in COLLECTIVES:
            for answer in pool.ask("measure", **what, n_calls=2, n_samples=3):
                assert len(answer["times_s"]) == 3
                assert min(answer["times_s"]) > 0


def test_every_type_and_operation_of_nccl_tests_is_right_in_place_and_out_of_place(
    pool_of: Callable[[str], WorkerPool],
) -> None:
    for dtype in ("bfloat16", "float16", "float64", "int8", "uint8", "int64"):
        for op in OPERATIONS:
            for in_place in (False, True):
                what = {"collective": "reduce_scatter", "dtype": dtype, "op": op}
                how = {"n_bytes": 4096, "in_place": in_place}
                answers = pool_of("shoal").ask("check", **what, **how)
                assert answers == [{"n_wrong": 0}, {"n_wrong": 0}], what
