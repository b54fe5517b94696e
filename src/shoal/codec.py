"""Codecs: the encodings of elements between hosts, with the numbers of native/fold/codec.h.

docs/wire.md describes the rounding of narrow codecs, docs/decisions/0013 and 0073 the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from shoal.errors import UsageError

__all__ = ["CODECS", "Codec", "codec_of", "parse_wire", "top_k"]

_FLOAT32_BYTES: Final = 4
_INDEX_BITS: Final = 12
_SCALE_BYTES: Final = 1
_TOP_K_BLOCK: Final = 1 << _INDEX_BITS
_TOP_K_BITS: Final = {6: 8, 7: 2}  # of a value, by the codec's number


@dataclass(frozen=True, slots=True)
class Codec:
    """The encoding of a call's elements between hosts.

    Attributes:
        name: in `wire=`, descriptions and errors.
        number: as in native/fold/codec.h.
        bits: of an encoded element.
        error: the largest error of one rounding, relative to the largest value of its block; to
            the value itself in codecs without blocks.
        block: the number of elements that are encoded together.
        keep: the number of elements kept of a full block; 0: all.
    """

    name: str
    number: int
    bits: int = 32
    error: float = 0.0
    block: int = 1
    keep: int = 0

    IDENTITY: ClassVar[Codec]
    """Elements as they are in memory."""
    BF16: ClassVar[Codec]
    """float32 as bfloat16, rounded to nearest, ties to even."""
    FP16: ClassVar[Codec]
    """float32 as float16, rounded to nearest, ties to even; 65,520 and more are infinity."""

    MXFP8: ClassVar[Codec]
    """Blocks of 32 with one scale, elements of 8 bits: E4M3 (OCP Microscaling)."""
    MXINT8: ClassVar[Codec]
    """Blocks of 32 with one scale, elements of 8 bits: INT8 (OCP Microscaling)."""
    MXFP4: ClassVar[Codec]
    """Blocks of 32 with one scale, elements of 4 bits: E2M1 (OCP Microscaling)."""

    @property
    def is_narrow(self) -> bool:
        """True unless elements are sent as they are in memory."""
        return self.number != 0

    @property
    def sums_at_random(self) -> bool:
        """True if averagers' sums are rounded at random; all other sums are rounded to nearest."""
        return self.block > 1 and self.keep == 0

    @property
    def share(self) -> float:
        """The bytes sent for each byte in memory, of a long buffer."""
        return self.bytes_of(self.block) / (_FLOAT32_BYTES * self.block)

    def bytes_of(self, n_elems: int) -> int:
        """Return the bytes on the wire of `n_elems` elements of float32."""
        n_whole, rest = divmod(n_elems, self.block)
        return n_whole * self._block_bytes(self.block) + (self._block_bytes(rest) if rest else 0)

    def _block_bytes(self, n_elems: int) -> int:
        n_bytes = _SCALE_BYTES if self.block > 1 else 0
        if self.keep:
            n_elems = max(1, -(-self.keep * n_elems // self.block))
            n_bytes += -(-_INDEX_BITS * n_elems // 8)
        return n_bytes + -(-self.bits * n_elems // 8)

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


Codec.IDENTITY = Codec("identity", 0)
Codec.BF16 = Codec("bf16", 1, 16, 2.0**-8)
Codec.FP16 = Codec("fp16", 2, 16, 2.0**-11)
Codec.MXFP8 = Codec("mxfp8", 3, 8, 2.0**-3, block=32)
Codec.MXINT8 = Codec("mxint8", 4, 8, 2.0**-7, block=32)
Codec.MXFP4 = Codec("mxfp4", 5, 4, 2.0**-2, block=32)

_ALL: Final = (Codec.IDENTITY, Codec.BF16, Codec.FP16, Codec.MXFP8, Codec.MXINT8, Codec.MXFP4)
CODECS: Final = {codec.name: codec for codec in _ALL}
"""The codecs that `wire=` accepts, by name."""


def top_k(share: float, bits: int) -> Codec:
    """Return the codec that sends the largest `share` of each 4,096 elements, in `bits` bits."""
    number = {b: number for number, b in _TOP_K_BITS.items()}[bits]
    return codec_of(number, max(1, math.ceil(share * _TOP_K_BLOCK)))


def codec_of(number: int, keep: int) -> Codec:
    """Return the codec with this number and `keep`, as messages carry them, or ValueError."""
    if number in _TOP_K_BITS and 0 < keep <= _TOP_K_BLOCK:
        bits = _TOP_K_BITS[number]
        name = f"topk:{keep / _TOP_K_BLOCK:g}:{bits}"
        return Codec(name, number, bits, 1.0, _TOP_K_BLOCK, keep)
    for codec in CODECS.values():
        if codec.number == number and not keep:
            return codec
    raise ValueError(f"codec {number} that keeps {keep}")


def parse_wire(value: object) -> Codec:
    """Return the Codec for `value`, a Codec or its name; UsageError for anything else."""
    if isinstance(value, Codec):
        return value
    codec = CODECS.get(value) if isinstance(value, str) else None
    if codec is None:
        raise UsageError(f"unknown wire {value!r}; give one of {', '.join(CODECS)}")
    return codec
