"""The formats of OCP Microscaling (MX) v1.0 in NumPy, written from its text alone.

A block is one scale byte (E8M0: two to the power of the byte less 127, 255 is NaN) and then its
elements, of 8 bits or two per byte, the first in the lower half. Values are converted by section
6.3 of the text: the scale is the largest power of two that is not above the block's largest
magnitude, divided by the largest power of two of the element format, and elements beyond the
largest of the format clamp. The text leaves the rest open; here elements are rounded to nearest,
ties to even, int8 clamps to +-127, and a block with a non-finite value is NaN completely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
NAN_SCALE = 255

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """An element format.

    Attributes:
        bits: of an element.
        emax: the exponent of its largest power of two.
        magnitudes: the value of each code without its sign, in ascending order.
    """

    bits: int
    emax: int
    magnitudes: NDArray[np.float64]


def _float_magnitudes(n_fraction_bits: int, bias: int, n_codes: int) -> NDArray[np.float64]:
    exponents, fractions = np.divmod(np.arange(n_codes), 1 << n_fraction_bits)
    units = np.where(exponents > 0, fractions + (1 << n_fraction_bits), fractions)
    return np.ldexp(units.astype(np.float64), np.maximum(exponents, 1) - bias - n_fraction_bits)


FORMATS = {
    "mxfp8": Format(8, 8, _float_magnitudes(3, 7, 127)),  # E4M3; the code 0x7f is NaN
    "mxint8": Format(8, 0, np.arange(128) / 64.0),
    "mxfp4": Format(4, 2, _float_magnitudes(1, 1, 8)),  # E2M1
}


def bytes_of(name: str, n_elems: int) -> int:
    """Return the bytes of `n_elems` elements: the last block may be shorter."""
    whole, rest = divmod(n_elems, BLOCK)
    of_block = {n: 1 + (FORMATS[name].bits * n + 7) // 8 for n in (BLOCK, rest)}
    return whole * of_block[BLOCK] + (of_block[rest] if rest else 0)


def encode(name: str, values: Floats) -> bytes:
    """Return `values` as the bytes of the format `name`."""
    form = FORMATS[name]
    blocks = np.zeros((-(-len(values) // BLOCK), BLOCK), np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        blocks.ravel()[: len(values)] = values
    finite = np.isfinite(blocks).all(axis=1)
    blocks[~finite] = 0
    largest = np.abs(blocks).max(axis=1, initial=0)
    exponents = np.where(largest > 0, np.frexp(largest)[1] - 1 - form.emax, -127)
    exponents = np.maximum(exponents, -127)
    codes = _codes(name, np.ldexp(blocks, -exponents[:, None]))
    if form.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = np.where(finite, exponents + 127, NAN_SCALE).astype(np.uint8)
    return np.hstack([scales[:, None], codes]).tobytes()[: bytes_of(name, len(values))]


def _codes(name: str, scaled: NDArray[np.float64]) -> Bytes:
    magnitudes = FORMATS[name].magnitudes
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(middles, np.abs(scaled))
    is_tie = np.append(middles, np.inf)[below] == np.abs(scaled)
    codes = (below + (is_tie & (below % 2 == 1))).astype(np.uint8)
    if name == "mxint8":  # two's complement: there is no -0
        return np.where(np.signbit(scaled), -codes.astype(np.int8), codes).astype(np.uint8)
    return codes | np.signbit(scaled).astype(np.uint8) << (FORMATS[name].bits - 1)


def decode(name: str, encoded: bytes, n_elems: int) -> Floats:
    """Return the `n_elems` values of any bytes, including bytes that `encode` never writes."""
    form = FORMATS[name]
    n_blocks, size = -(-n_elems // BLOCK), 1 + BLOCK * form.bits // 8
    padded = np.zeros((n_blocks, size), np.uint8)
    padded.ravel()[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    codes = padded[:, 1:]
    if form.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(n_blocks, BLOCK)
    elements = element_values(name)[codes]
    with np.errstate(over="ignore"):
        values = np.ldexp(elements, padded[:, :1].astype(int) - 127).astype(np.float32)
    values[padded[:, 0] == NAN_SCALE] = np.nan
    return values.ravel()[:n_elems]


def element_values(name: str) -> NDArray[np.float64]:
    """Return the value of each code of an element."""
    form = FORMATS[name]
    if name == "mxint8":
        return np.arange(256).astype(np.uint8).astype(np.int8) / 64.0
    half = np.full(1 << (form.bits - 1), np.nan)
    half[: len(form.magnitudes)] = form.magnitudes
    return np.concatenate([half, -half])


def rounded(name: str, values: Floats) -> Floats:
    """Return `values` after encoding and decoding."""
    return decode(name, encode(name, values), len(values))
