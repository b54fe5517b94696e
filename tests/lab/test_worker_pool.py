"""The measured processes: their answers and their failures."""

import os
from pathlib import Path

import pytest

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
