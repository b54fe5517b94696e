"""Element types and fold operations, with the numbers of native/fold/dtype.h."""

from __future__ import annotations

import enum
from typing import Final

from shoal.errors import UsageError

__all__ = ["DType", "Op", "parse_dtype", "parse_op"]


class _Named(enum.IntEnum):
    """A number that prints as its name in lower case."""

    # Both are defined because IntEnum prints the number or the name, depending on Python's version.
    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class DType(_Named):
    """The type of one element. The numbers cross the wire: never renumber, only append."""

    n_bytes: int
    """The bytes of one element."""

    def __new__(cls, number: int, n_bytes: int) -> DType:
        """Make a member from a row of the table below."""
        dtype = int.__new__(cls, number)
        dtype._value_, dtype.n_bytes = number, n_bytes
        return dtype

    FLOAT32 = 0, 4
    FLOAT64 = 1, 8
    FLOAT16 = 2, 2
    BFLOAT16 = 3, 2
    INT8 = 4, 1
    INT16 = 5, 2
    INT32 = 6, 4
    INT64 = 7, 8
    UINT8 = 8, 1
    BOOL = 9, 1
    COMPLEX64 = 10, 8
    COMPLEX128 = 11, 16
    UINT16 = 12, 2
    UINT32 = 13, 4
    UINT64 = 14, 8


class Op(_Named):
    """How two values fold into one. The numbers cross the wire: never renumber, only append."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_DTYPES: Final = {str(dtype): dtype for dtype in DType}
_OPS: Final = {str(op): op for op in Op}


def parse_dtype(value: object) -> DType:
    """Return the DType for a DType, a name, a NumPy type (also of ml_dtypes), or a torch dtype.

    Imports no framework. UsageError for an unknown type or a foreign byte order.
    """
    if isinstance(value, DType):
        return value
    # A NumPy dtype of the other byte order has the same name: folding it would give nonsense.
    if getattr(value, "isnative", True) is False:
        raise UsageError(
            f"dtype {value} is not in this machine's byte order; convert it first, "
            "for instance by array.astype(array.dtype.newbyteorder('='))"
        )
    dtype = _DTYPES.get(_name_of_dtype(value))
    if dtype is None:
        raise UsageError(f"unknown dtype {value!r}; give one of {', '.join(_DTYPES)}")
    return dtype


def parse_op(value: object) -> Op:
    """Return the Op for `value`, an Op or its name; UsageError for anything else."""
    if isinstance(value, Op):
        return value
    op = _OPS.get(value) if isinstance(value, str) else None
    if op is None:
        raise UsageError(f"unknown operation {value!r}; give one of {', '.join(_OPS)}")
    return op


def _name_of_dtype(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type):  # numpy.float32; NumPy 1 calls its bool "bool_"
        return value.__name__.rstrip("_")
    name = getattr(value, "name", None)  # numpy.dtype
    return name if isinstance(name, str) else str(value).removeprefix("torch.")
