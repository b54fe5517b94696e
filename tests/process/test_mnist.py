"""examples/mnist.py, the port of Horovod's example."""

from __future__ import annotations

import gzip
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def example() -> Any:
    spec = importlib.util.spec_from_file_location("mnist_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_ranks_learn_to_read_digits() -> None:
    run = subprocess.run(
        [sys.executable, *TORCHRUN, EXAMPLE, "--images=3000", "--epochs=5"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    reached = [float(found) for found in re.findall(r"accuracy ([\d.]+)", run.stdout)]
    assert len(reached) == 5  # from rank 0 alone
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
    found_images, found_labels = example().mnist(tmp_path, "t10k").tensors
    np.testing.assert_allclose(found_images[:, 0], images / 255, rtol=1e-6)
    np.testing.assert_array_equal(found_labels, labels)
