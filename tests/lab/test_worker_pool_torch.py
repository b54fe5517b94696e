"""Ranks of torch.distributed under the benchmark: every collective is right, groups form again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.elements import OPERATIONS
from shoal.bench.job import Failure, JobSpec
from shoal.bench.launch import Placement
from shoal.bench.worker_pool import WorkerPool

NOWHERE = Placement({"openmpi": Path("nowhere")}, program="bench.scoreboard.worker")


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[str], WorkerPool]]:
    """Two ranks of a library, started once: each rank imports torch."""
    with ExitStack() as on_exit:
        yield cache(lambda name: on_exit.enter_context(WorkerPool(JobSpec(name, 2), NOWHERE)))


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


def test_a_group_forms_again_in_the_same_processes(pool: WorkerPool) -> None:
    assert all(answer["start_s"] > 0 for answer in pool.ask("started"))
    for _ in range(2):
        assert all(answer["time_s"] > 0 for answer in pool.ask("restart"))
    what = {"n_bytes": 64}
    assert pool.ask("check", **what) == [{"n_wrong": 0}, {"n_wrong": 0}]


def test_subgroups_are_formed_and_used(pool: WorkerPool) -> None:
    for answer in pool.ask("subgroups", n_groups=3, n_members=1):
        assert answer["form_s"] > 0
        assert answer["use_s"] > 0


def test_an_algorithm_can_be_asked_for_and_the_planner_names_its_own(
    pool_of: Callable[[str], WorkerPool],
) -> None:
    what = {"n_bytes": 4096, "collective": "broadcast"}
    pool = pool_of("shoal")
    assert pool.ask("check", **what, algorithm="chain") == [{"n_wrong": 0}, {"n_wrong": 0}]
    chosen = {answer["name"] for answer in pool.ask("choice", collective="gather", n_bytes=64)}
    assert len(chosen) == 1
    assert chosen <= {"direct", "binomial"}


def test_only_torch_can_be_asked_to_form_groups() -> None:
    with (
        WorkerPool(JobSpec("copy", 2), NOWHERE) as pool,
        pytest.raises(Failure, match=r"only torch"),
    ):
        pool.ask("restart")


@pytest.mark.parametrize("n_bulk", [0, 2])
def test_every_rank_times_the_same_small_calls_beside_large_ones(
    pool: WorkerPool, n_bulk: int
) -> None:
    first, second = pool.ask("latencies", n_bulk=n_bulk, bulk_bytes=1 << 20)
    assert len(first["times_s"]) == len(second["times_s"])
    assert n_bulk or len(first["times_s"]) > 100


def test_calls_that_nobody_cuts_have_a_median(pool: WorkerPool) -> None:
    for answer in pool.ask("cut_calls", n_bytes=4096, n_calls=3, interface="none", down_s=0.0):
        assert answer["cut_s"] == []
        assert answer["median_s"] > 0
