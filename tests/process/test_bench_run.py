"""`shoal bench` with real ranks: ranks that it starts, and ranks of a launcher."""

import json
import subprocess
import sys
from pathlib import Path

from process.ranks import start_ranks

from shoal.bench.collectives import COLLECTIVES

DEADLINE_S = 200
COMMAND = [sys.executable, "-m", "shoal", "bench"]
QUICK = ["--through", "numpy", "-n", "4", "-w", "1", "--rounds", "2"]


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def test_every_collective_is_measured_and_right(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    sizes = ["-b", "1K", "-e", "4K", "-f", "4"]
    done = bench("all", *sizes, *QUICK, "--ranks", "2", "--json", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    # Two sizes of each, and one of a barrier; the rows of nccl-tests have 13 words.
    assert len(rows) == 2 * (len(COLLECTIVES) - 1) + 1
    assert all(len(row) == 13 for row in rows)
    report = json.loads(out.read_text())
    for name, collective in COLLECTIVES.items():
        points = [one for one in report["points"] if one["collective"] == name]
        assert {one["in_place"] for one in points} == {*collective.in_place}
        assert all(one["n_wrong"] == 0 and min(one["times_us"]) > 0 for one in points)
        assert {one["n_calls"] for one in points} == {4}
    sizes = {(one["size"], one["count"]) for one in report["points"]}
    assert sizes == {(int(row[0]), int(row[1])) for row in rows}


def run_bench(words: list[str]) -> None:
    from shoal.cli import main

    assert main(["bench", *words]) == 0


def test_ranks_of_a_launcher_measure_together_and_one_prints(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["all_reduce", "-b", "1K", "-e", "1K", *QUICK, "-J", str(out), "--peers", "gloo"]
    with start_ranks(run_bench, 2, words, needs="torch") as ranks:
        text, other = ranks.outputs(DEADLINE_S)
    assert other == ""
    ((*_, wrong),) = rows_of(text)
    assert wrong == "0"
    report = json.loads(out.read_text())
    assert report["run"]["ranks"] == "2 ranks"
    found = [(one["library"], one["n_wrong"]) for one in report["points"]]
    assert found == [("shoal", 0), ("gloo", 0)]
