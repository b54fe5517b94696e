"""The demo with a small model, a short run, and forked processes as torchrun's workers."""

import re
from pathlib import Path

import pytest
from process.examples import run_example, run_ranks_of

pytest.importorskip("torch")

TINY = ["--steps=6", "--batch=1", "--context=16", "--width=32", "--layers=1", "--rows=64"]


def row(table: str, label: str) -> list[str]:
    [line] = re.findall(rf"^ *{re.escape(label)} +(.*)$", table, flags=re.MULTILINE)
    return line.split()


def test_the_demo_prints_equal_losses_for_both_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress: list[str] = []

    def torchrun(argv: list[str]) -> None:
        standalone, size, script, *options = argv
        assert standalone == "--standalone"
        n_ranks = int(size.removeprefix("--nproc-per-node="))
        progress.extend(run_ranks_of(Path(script).name, n_ranks, *options))

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    table = run_example("demo.py", "--backends", "shoal", "gloo", *TINY)
    assert row(table, "shoal") == ["gloo", "gloo/shoal"]
    for label in ("training loss (bits per byte)", "held-out loss (bits per byte)"):
        ours, theirs, ratio = row(table, label)
        assert ours == theirs
        assert ratio == "1.00"
    assert "equal to the last bit, at each of 6 steps and held out" in table
    assert float(row(table, "time per step (ms)")[0]) > 0
    assert [text.count("6/6") for text in progress] == [1, 0, 1, 0]
