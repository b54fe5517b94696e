"""Codecs: the encodings of elements between hosts, with the numbers of native/fold/codec.h.

docs/wire.md says what a narrow codec does to values, docs/decisions/0013 why.
"""

from __future__ import annotations

import enum
from typing import Final

from shoal.errors import UsageError

__all__ = ["Codec", "parse_wire"]


class Codec(enum.IntEnum):
    """The encoding of a call's elements between hosts. Append only, as for `DType`."""

    share: float
    """The bytes that travel for each byte in memory."""
    error: float
    """The largest error of one rounding, relative to the value."""

    def __new__(cls, number: int, share: float, error: float) -> Codec:
        """Make a member from a row of the table below."""
        codec = int.__new__(cls, number)
        codec._value_, codec.share, codec.error = number, share, error
        return codec

    IDENTITY = 0, 1.0, 0.0
    """Elements as they are in memory."""
    BF16 = 1, 0.5, 2.0**-8
    """float32 as bfloat16, rounded to nearest, ties to even."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


_CODECS: Final = {str(codec): codec for codec in Codec}


def parse_wire(value: object) -> Codec:
    """Return the Codec that `value` names.

    Args:
        value: a Codec or its name.

    Raises:
        UsageError: no such codec.
    """
    codec = _CODECS.get(str(value)) if isinstance(value, (Codec, str)) else None
    if codec is None:
        raise UsageError(f"unknown wire {value!r}; give one of {', '.join(_CODECS)}")
    return codec
