"""The measured processes: their answers and failures, and collectives of torch among them."""

import os
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

# Ranks that copy need no library, and start in 0.2 s.
COPIERS = JobSpec("copy", 2)
HERE = Placement(program="bench.scoreboard.worker")
TENSOR = {"n_bytes": 4096}


def test_ranks_check_measure_and_count_their_tensors_and_errors_quote_them() -> None:
    with WorkerPool(COPIERS, HERE) as pool:
        assert pool.ask("check", **TENSOR) == [{"n_wrong": 0}, {"n_wrong": 0}]
        for answer in pool.ask("measure", **TENSOR, n_calls=3, n_samples=4):
            assert len(answer["times_s"]) == len(answer["cpu_s"]) == 4
            assert min(answer["times_s"]) > 0
        assert [answer["tensor_bytes"] for answer in pool.ask("peak")] == [4096, 4096]
        pool.ask("forget")
        assert [answer["tensor_bytes"] for answer in pool.ask("peak")] == [0, 0]
        with pytest.raises(Failure, match="juggle"):
            pool.ask("juggle")


def test_no_process_outlives_a_failed_team() -> None:
    pool = WorkerPool(COPIERS, HERE)
    pids = [int(answer["pid"]) for answer in pool.ask("peak")]
    os.kill(pids[1], 9)
    with pytest.raises(Failure, match="rank 1 died, ended by SIGKILL"):
        pool.ask("check", **TENSOR)
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_many_ranks_are_forks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.launch._FORKED_FROM", 2)
    with WorkerPool(COPIERS, HERE) as pool:
        parents = {
            Path(f"/proc/{answer['pid']}/stat").read_text().rpartition(")")[2].split()[1]
            for answer in pool.ask("peak")
        }
        assert len(parents) == 1
        assert parents != {str(os.getpid())}
        assert pool.ask("check", **TENSOR) == [{"n_wrong": 0}, {"n_wrong": 0}]
        for answer in pool.ask("footprint"):
            assert answer["pss_bytes"] > 1 << 20
            assert answer["n_fds"] > 3


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


def test_all_types_and_operations_work_in_place_too(pool_of: Callable[[str], WorkerPool]) -> None:
    for dtype in ("bfloat16", "float16", "float64", "int8", "uint8", "int64"):
        for op in OPERATIONS:
            for in_place in (False, True):
                what = {"collective": "reduce_scatter", "dtype": dtype, "op": op}
                how = {"n_bytes": 4096, "in_place": in_place}
                answers = pool_of("shoal").ask("check", **what, **how)
                assert answers == [{"n_wrong": 0}, {"n_wrong": 0}], what
