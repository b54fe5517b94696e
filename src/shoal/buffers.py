"""Memory as shoal takes it: an address, a length and a type, and who keeps it alive."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

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


# struct format characters of the buffer protocol, native size and order.
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
    """The memory of `data`: a Span, a NumPy array, a CPU torch tensor, or anything with a buffer.

    Raises:
        UsageError: not contiguous, read-only where it will be written, or of a type that shoal
            does not know.
    """
    if isinstance(data, Span):
        return data
    interface = getattr(data, "__array_interface__", None)
    if interface is not None:
        address, read_only = interface["data"]
        dtype = parse_dtype(data.dtype)
        _check(data, data.flags["C_CONTIGUOUS"], read_only and writable)
        return Span(address, data.size, dtype, data)
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu":
            raise UsageError(f"{_name(data)} is on {data.device}; shoal takes CPU memory here")
        _check(data, data.is_contiguous(), read_only=False)
        return Span(data.data_ptr(), data.numel(), parse_dtype(data.dtype), data)
    return _span_of_buffer(data, writable=writable)


def _span_of_buffer(data: Any, *, writable: bool) -> Span:
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError(
            f"{_name(data)} has no buffer; pass a NumPy array, a tensor, a bytearray or a Span"
        ) from None
    dtype = _FORMATS.get(view.format.lstrip("@="))
    if dtype is None:
        raise UsageError(f"{_name(data)} has elements of format {view.format!r}, unknown to shoal")
    _check(data, view.c_contiguous, view.readonly and writable)
    if view.nbytes == 0:
        return Span(0, 0, dtype, data)
    if view.readonly:
        # ctypes refuses read-only buffers; NumPy's frombuffer would do, but is no dependency.
        copy = ctypes.create_string_buffer(view.tobytes(), view.nbytes)
        return Span(ctypes.addressof(copy), view.nbytes // item_size(dtype), dtype, copy)
    held = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
    return Span(ctypes.addressof(held), view.nbytes // item_size(dtype), dtype, held)


def _check(data: object, contiguous: bool, read_only: bool) -> None:
    if not contiguous:
        raise UsageError(f"{_name(data)} is not contiguous in memory; pass a contiguous copy")
    if read_only:
        raise UsageError(f"{_name(data)} is read-only, and this call writes to it")


def _name(data: object) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
