"""The NumPy version of the Microscaling formats: compared with ml_dtypes, and its properties."""

import ml_dtypes
import mx
import numpy as np
import pytest

from shoal.codec import CODECS
from shoal.dtypes import DType
from shoal.engine import round_to

FLOATS = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float4_e2m1fn}


def blocks(n_blocks: int, seed: int) -> mx.Floats:
    """Return blocks of any scale, with zeros, and elements far below the largest."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n_blocks, mx.BLOCK)) * (random.random((n_blocks, mx.BLOCK)) > 0.1)
    near = random.integers(-12, 1, size=values.shape)
    scales = random.integers(-150, 125, size=(n_blocks, 1))
    return np.ldexp(values, near + scales).astype(np.float32).ravel()


@pytest.mark.parametrize("name", FLOATS)
def test_the_value_of_each_code_equals_that_of_ml_dtypes(name: str) -> None:
    codes = np.arange(1 << mx.FORMATS[name].bits, dtype=np.uint8)
    wanted = codes.view(FLOATS[name]).astype(np.float64)
    np.testing.assert_array_equal(mx.element_values(name), wanted)


@pytest.mark.parametrize("name", FLOATS)
def test_elements_are_rounded_as_in_ml_dtypes(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(2000, mx.BLOCK)).astype(np.float32)
    middles = (mx.FORMATS[name].magnitudes[1:] + mx.FORMATS[name].magnitudes[:-1]) / 2
    middles = np.resize(np.concatenate([middles, -middles]), (20, mx.BLOCK))
    largest = mx.FORMATS[name].magnitudes[-1]
    values = np.concatenate([values * largest / 4, middles]).clip(-largest, largest)
    values[:, 0] = largest  # so that the scale is one
    expected = values.astype(FLOATS[name]).astype(np.float32)
    np.testing.assert_array_equal(mx.rounded(name, values.ravel()), expected.ravel())


def test_scales_are_as_in_ml_dtypes() -> None:
    encoded = bytes(b for scale in range(256) for b in (scale, 64, *[0] * 31))
    values = mx.decode("mxint8", encoded, 256 * mx.BLOCK)[:: mx.BLOCK]
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(values, scales.astype(np.float32))


@pytest.mark.parametrize("name", mx.FORMATS)
def test_native_rounding_is_as_in_numpy(name: str) -> None:
    anything = np.random.default_rng(5).integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    for values in (blocks(30_000, 6), anything, blocks(2, 7)[:45]):
        rounded, expected = np.array(values), mx.rounded(name, values)
        round_to(CODECS[name], DType.FLOAT32, rounded.ctypes.data, len(rounded))
        np.testing.assert_array_equal(rounded, expected, strict=True)
        signs = np.signbit(expected) | np.isnan(rounded)
        np.testing.assert_array_equal(np.signbit(rounded) | np.isnan(rounded), signs)
