"""The demo, and the port of Horovod's example of MNIST, with small models on forked processes."""

import gzip
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from process.examples import EXAMPLES, run_example, run_ranks_of

pytest.importorskip("torch")

TINY = ["--steps=6", "--batch=1", "--context=16", "--width=32", "--layers=1", "--rows=64"]


def test_two_ranks_learn_digits() -> None:
    printed, other = run_ranks_of("mnist.py", 2, "--images=3000", "--epochs=5")
    reached = [float(found) for found in re.findall(r"accuracy ([\d.]+)", printed)]
    assert (len(reached), other) == (5, "")
    assert reached[-1] > 0.95, reached


@pytest.mark.parametrize("is_compressed", [False, True])
def test_files_of_mnist_are_read(tmp_path: Path, is_compressed: bool) -> None:
    images = np.random.default_rng(0).integers(256, size=(5, 28, 28)).astype(np.uint8)
    labels = np.arange(5, dtype=np.uint8)
    heads = {"images-idx3": (2051, 5, 28, 28), "labels-idx1": (2049, 5)}  # MNIST's own numbers
    for (name, head), values in zip(heads.items(), (images, labels), strict=True):
        data = np.array(head, ">u4").tobytes() + values.tobytes()
        path = tmp_path / f"t10k-{name}-ubyte"
        if is_compressed:
            path = path.with_name(f"{path.name}.gz")
            data = gzip.compress(data)
        path.write_bytes(data)
    example = runpy.run_path(str(EXAMPLES / "mnist.py"))
    found_images, found_labels = example["mnist"](tmp_path, "t10k").tensors
    np.testing.assert_allclose(found_images[:, 0], images / 255, rtol=1e-6)
    np.testing.assert_array_equal(found_labels, labels)


def row(table: str, label: str) -> list[str]:
    [line] = re.findall(rf"^ *{re.escape(label)} +(.*)$", table, flags=re.MULTILINE)
    return line.split()


def test_the_demo_prints_equal_losses_for_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
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
