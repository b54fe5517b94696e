"""Values of a fusion buffer: scaling, and finding non-finite ones."""

import ml_dtypes
import numpy as np
import pytest

from shoal.average.preparing import not_finite, scale
from shoal.dtypes import DType

FACTORS = [0.0, 0.25, 1 / 3, 1.0, 1.1, 3.0]


@pytest.mark.parametrize("factor", FACTORS)
def test_bfloat16_is_scaled_as_ml_dtypes_rounds_it(factor: float) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = every.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(factor)
        want = values.astype(ml_dtypes.bfloat16)
        if factor == 0.0:
            want = np.zeros_like(want)
        scale(every, DType.BFLOAT16, factor)
    found = every.view(ml_dtypes.bfloat16)
    is_nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint16), want[~is_nan].view(np.uint16))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_elements_are_scaled_and_rounded_once(dtype: str, factor: float) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(dtype)
    factor_type = np.float32 if dtype == "float16" else np.dtype(dtype).type
    want = (values * factor_type(factor)).astype(dtype)  # float16 is rounded once
    scale(values, DType[dtype.upper()], factor)
    np.testing.assert_array_equal(values, want)


def test_scaling_by_0_turns_non_finite_values_into_zero() -> None:
    values = np.array([np.nan, np.inf, -1.0])
    scale(values, DType.FLOAT64, 0.0)
    assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
def test_the_first_non_finite_element_is_found(dtype: str, bad: float) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = np.full(100, 3.0, kind)
    bits = values.view(np.uint16) if dtype == "bfloat16" else values
    assert not_finite(bits, DType[dtype.upper()]) is None
    values[70] = values[41] = bad
    assert not_finite(bits, DType[dtype.upper()]) == 41


def test_integers_are_finite() -> None:
    assert not_finite(np.full(5, 0x7F80, np.uint16), DType.UINT16) is None
