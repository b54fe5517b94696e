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

    IDENTITY = 0
    """Elements as they are in memory."""
    BF16 = 1
    """float32 as bfloat16, rounded to nearest, ties to even."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @property
    def share(self) -> float:
        """The bytes that travel for each byte in memory."""
        return 0.5 if self is Codec.BF16 else 1.0


_CODECS: Final = {str(codec): codec for codec in Codec}


def parse_wire(value: object) -> Codec:
    """Return the Codec that `value` names.

    Args:
        value: a Codec or its name: "identity" or "bf16".

    Raises:
        UsageError: no such codec.
    """
    codec = _CODECS.get(str(value)) if isinstance(value, (Codec, str)) else None
    if codec is None:
        raise UsageError(f"unknown wire {value!r}; give one of {', '.join(_CODECS)}")
    return codec
