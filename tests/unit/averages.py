"""Test data of averages: arrays of many shapes and types, ranks' values, and NumPy's averages."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shoal.average import Averager

Shapes = dict[str, tuple[tuple[int, ...], str]]
SHAPES: Shapes = {
    "embedding": ((300, 11), "float32"),
    "scale": ((), "float64"),
    "weight": ((57, 3, 2), "float32"),
    "nothing": ((0, 4), "float32"),
    "bias": ((1000,), "float64"),
    "half": ((501,), "float16"),
    "phase": ((33,), "complex64"),
    "last": ((1,), "float32"),
}


def values(name: str, rank: int, step: int) -> Any:
    """Return a rank's values: multiples of 1/8, whose sums over a few ranks are exact."""
    shape, dtype = SHAPES[name]
    source = np.random.default_rng(sum(map(ord, name)) * 1000 + rank * 100 + step)
    drawn = source.integers(-64, 64, shape) / 8
    if dtype == "complex64":
        drawn = drawn + 1j * source.integers(-64, 64, shape) / 8
    return np.asarray(drawn).astype(dtype)


def average(name: str, size: int, step: int) -> Any:
    wide = np.complex128 if SHAPES[name][1] == "complex64" else np.float64
    total = sum(values(name, rank, step).astype(wide) for rank in range(size))
    return np.asarray(total / size).astype(SHAPES[name][1])


def put(averager: Averager, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        averager.arrays[name][...] = value
        averager.ready(name)


def fill(averager: Averager, step: int, names: Iterable[str] = SHAPES) -> None:
    put(averager, {name: values(name, averager.group.rank, step) for name in names})


def average_filled(averager: Averager, step: int, names: Iterable[str] = SHAPES) -> None:
    averager.begin()
    fill(averager, step, names)
    averager.wait()


def averaged(averager: Averager, given: Mapping[str, Any], *weight: float | None) -> Any:
    averager.begin(*weight)
    put(averager, given)
    averager.wait()
    return averager.arrays


def shuffled(rank: int, step: int) -> list[str]:
    return random.Random(f"{rank} {step}").sample(list(SHAPES), len(SHAPES))


def check(averager: Averager, step: int, names: list[str] | None = None) -> None:
    for name in names or SHAPES:
        want = average(name, averager.group.size, step)
        # float16 is divided before it is summed: the unit of quotients up to 2.67 is 2**-9.
        absolute = averager.group.size * 2**-9 if name == "half" else 0
        np.testing.assert_allclose(averager.arrays[name], want, rtol=1e-6, atol=absolute)
        assert averager.arrays[name].shape == SHAPES[name][0]
        assert averager.arrays[name].dtype == SHAPES[name][1]
