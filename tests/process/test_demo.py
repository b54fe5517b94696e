"""The demo, from its entry point, with a model and a run small enough for a test."""

import re

import pytest
from process.examples import run_example

pytest.importorskip("torch")

TINY = ["--steps=6", "--batch=1", "--context=16", "--width=32", "--layers=1", "--rows=64"]


def row(table: str, label: str) -> list[str]:
    [line] = re.findall(rf"^ *{re.escape(label)} +(.*)$", table, flags=re.MULTILINE)
    return line.split()


def test_demo_prints_a_table_in_which_both_backends_learn_the_same() -> None:
    run = run_example("demo.py", "--backends", "shoal", "gloo", *TINY)
    assert row(run.stdout, "shoal") == ["gloo", "gloo/shoal"]
    for label in ("training loss (bits per byte)", "held-out loss (bits per byte)"):
        ours, theirs, ratio = row(run.stdout, label)
        assert ours == theirs
        assert ratio == "1.00"
    assert "equal to the last bit, at each of 6 steps and held out" in run.stdout
    assert float(row(run.stdout, "time per step (ms)")[0]) > 0
    assert run.stderr.count("6/6") == 2  # progress of both runs, apart from the table
