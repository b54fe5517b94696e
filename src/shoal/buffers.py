"""Memory as shoal takes it: an address, a length and a type, and who keeps it alive."""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal import engine
from shoal.dtypes import DType, item_size, parse_dtype
from shoal.errors import UsageError


class Span(NamedTuple):
    """Contiguous memory of `n_elems` elements; `owner` is kept alive while a call uses it."""

    address: int
    n_elems: int
    dtype: DType
    owner: object

    @property
    def n_bytes(self) -> int:
        """Its length in bytes."""
        return self.n_elems * item_size(self.dtype)


# The struct module's letters: native size and order.
_FORMATS = {
    "f": DType.FLOAT32,
    "d": DType.FLOAT64,
    "e": DType.FLOAT16,
    "b": DType.INT8,
    "h": DType.INT16,
    "i": DType.INT32,
    "l": DType.INT64,
    "q": DType.INT64,
    "B": DType.UINT8,
    "c": DType.UINT8,
    "H": DType.UINT16,
    "I": DType.UINT32,
    "L": DType.UINT64,
    "Q": DType.UINT64,
    "?": DType.BOOL,
    "Zf": DType.COMPLEX64,
    "Zd": DType.COMPLEX128,
}


def span_of(data: Any, *, writable: bool = True) -> Span:
    """The memory of `data`: a Span, a CPU torch tensor, a NumPy array, or anything with a buffer.

    Raises:
        UsageError: not contiguous, read-only where it will be written, or of a type that shoal
            does not know.
    """
    if isinstance(data, Span):
        return data
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu":
            raise UsageError(f"{_name(data)} is on {data.device}; shoal takes CPU memory here")
        if not data.is_contiguous():
            raise UsageError(f"{_name(data)} is not contiguous in memory; pass a contiguous copy")
        return Span(data.data_ptr(), data.numel(), parse_dtype(data.dtype), data)
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError(
            f"{_name(data)} has no buffer; pass a NumPy array, a tensor, a bytearray or a Span"
        ) from None
    except ValueError:  # NumPy: its format has no letter
        raise UsageError(f"{_name(data)} has elements that shoal does not know") from None
    dtype = _FORMATS.get(view.format)
    if dtype is None:
        raise UsageError(
            f"{_name(data)} has elements of format {view.format!r}, which shoal does not know; "
            "convert it first, foreign byte orders too"
        )
    if not view.c_contiguous:
        raise UsageError(f"{_name(data)} is not contiguous in memory; pass a contiguous copy")
    if view.readonly and writable:
        raise UsageError(f"{_name(data)} is read-only, and this call writes to it")
    return Span(engine.address_of(view), view.nbytes // item_size(dtype), dtype, view)


def _name(data: object) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
