"""The demo, from its entry point, with a model and a run small enough for a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
TINY = ["--steps=6", "--batch=1", "--context=16", "--width=32", "--layers=1", "--rows=64"]


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *options, *TINY],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def row(table: str, label: str) -> list[str]:
    [line] = re.findall(rf"^ *{re.escape(label)} +(.*)$", table, flags=re.MULTILINE)
    return line.split()


def test_demo_prints_a_table_in_which_both_backends_learn_the_same() -> None:
    run = run_demo("--backends", "shoal", "gloo")

    assert run.returncode == 0, run.stderr
    assert row(run.stdout, "shoal") == ["gloo", "gloo/shoal"]
    for label in ("training loss (bits per byte)", "held-out loss (bits per byte)"):
        ours, theirs, ratio = row(run.stdout, label)
        assert ours == theirs
        assert ratio == "1.00"
    assert "equal to the last bit, at each of 6 steps and held out" in run.stdout
    assert float(row(run.stdout, "time per step (ms)")[0]) > 0
    assert run.stderr.count("6/6") == 2  # progress of both runs, apart from the table
