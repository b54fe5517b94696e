"""Codecs: how elements travel between hosts, under the numbers that native/fold/codec.h gives them.

docs/wire.md says what a narrow codec does to values, docs/decisions/0013 why it is so.
"""

from __future__ import annotations

import enum
from typing import Final

from shoal.errors import UsageError

__all__ = ["Codec", "parse_wire"]


class Codec(enum.IntEnum):
    """How the elements of a call travel between hosts. Append only, as for `DType`."""

    IDENTITY = 0
    """As they are."""
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
    """The Codec that `value` names.

    Args:
        value: a Codec or its name: "identity" or "bf16".

    Raises:
        UsageError: no such codec.
    """
    codec = _CODECS.get(str(value)) if isinstance(value, (Codec, str)) else None
    if codec is None:
        raise UsageError(f"unknown wire {value!r}; known are {', '.join(_CODECS)}")
    return codec
