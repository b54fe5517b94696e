"""examples/mnist.py, the port of Horovod's example."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.examples import EXAMPLES, run_ranks_of

EXAMPLE = EXAMPLES / "mnist.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("mnist_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    found_images, found_labels = example().mnist(tmp_path, "t10k").tensors
    np.testing.assert_allclose(found_images[:, 0], images / 255, rtol=1e-6)
    np.testing.assert_array_equal(found_labels, labels)
