"""Rounding by narrow wires and its error bounds, from sources independent of the code.

`mx` has the Microscaling formats; the other formats are NumPy's or one line.
"""

from __future__ import annotations

import functools

import mx
import numpy as np
from numpy.typing import NDArray

from shoal.codec import CODECS

Floats = NDArray[np.float32]

NARROW = tuple(word for word, codec in CODECS.items() if codec.is_narrow)
BLOCKS = tuple(word for word in NARROW if word in mx.FORMATS)

# The largest error of one rounding to nearest, as docs/wire.md states it: relative to the value, or
# to the largest magnitude of its block; and the remaining error at the smallest values.
ERRORS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "mxfp8": 2.0**-3, "mxint8": 2.0**-7, "mxfp4": 2.0**-2}
SMALLEST = {
    "bf16": 2.0**-134,
    "fp16": 2.0**-25,
    "mxfp8": 2.0**-136,
    "mxint8": 2.0**-133,
    "mxfp4": 2.0**-128,
}
# The same for rounding at random.
ERRORS_AT_RANDOM = {"mxfp8": 1 / 7, "mxint8": 1 / 63.5, "mxfp4": 1 / 2}


def block_of(wire: str) -> int:
    """The number of elements with one scale; 1 if each has its own."""
    return mx.BLOCK if wire in mx.FORMATS else 1


def rounded(wire: str, values: Floats) -> Floats:
    """Return a complete buffer as it arrives; unchanged for "identity"."""
    if wire == "identity":
        return values
    if wire in mx.FORMATS:
        return mx.rounded(wire, values)
    if wire == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16 << 16
    return bits.view(np.float32)


def magnitudes(wire: str, values: Floats) -> NDArray[np.float64]:
    """Return, by element, the magnitude to which its rounding error is relative."""
    sizes = np.abs(values.astype(np.float64))
    if block_of(wire) == 1:
        return sizes
    largest = np.maximum.reduceat(sizes, range(0, sizes.size, mx.BLOCK)) if sizes.size else sizes
    return np.repeat(largest, mx.BLOCK)[: sizes.size]


def bound_of_sum(
    wire: str,
    every: list[Floats],
    n_roundings: int = 2,
    *,
    divisor: int = 1,
    at_random: bool = False,
) -> NDArray[np.float64]:
    """The largest error of a sum of these buffers that docs/wire.md allows.

    Args:
        divisor: of an average.
        n_roundings: per element, of its contributions and of the sum.
        at_random: the sum is rounded at random.
    """
    most = functools.reduce(np.add, [magnitudes(wire, values) for values in every])
    errors = [ERRORS[wire]] * n_roundings
    if at_random and wire in ERRORS_AT_RANDOM:
        errors[-1] = ERRORS_AT_RANDOM[wire]
    factor = (1 + 2.0**-24) ** len(every)
    for error in errors:
        factor *= 1 + error
    return most * (factor - 1) / divisor + (len(every) + 1) * SMALLEST[wire]
