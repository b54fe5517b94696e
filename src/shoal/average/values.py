"""What is in a fusion buffer, as NumPy sees it: scaled, or looked at for what is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shoal.dtypes import DType
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.layout import Layout

_NO_NUMPY: Final = "weights, and a look at what is not finite, need NumPy, which is not installed"


def numpy_type(dtype: DType) -> str:
    """The name of NumPy's type for one element; for bfloat16, which it lacks, that of its bits."""
    return {DType.BOOL: "bool", DType.BFLOAT16: "uint16"}.get(dtype, str(dtype))


def numpy() -> Any:
    """The module.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise UsageError(_NO_NUMPY) from None
    return np


def numpy_arrays(memory: Any, layout: Layout) -> dict[str, Any] | None:
    """All arrays by name, as NumPy has them; None where NumPy is not installed."""
    try:
        import numpy as np
    except ImportError:
        return None
    kinds = {entry.dtype for entry in layout.entries}
    types = {dtype: np.dtype(numpy_type(dtype)) for dtype in kinds}
    return {
        entry.name: np.ndarray(entry.shape, types[entry.dtype], memory, place.offset)
        for entry, place in zip(layout.entries, layout.places, strict=True)
    }


def scale(flat: Any, dtype: DType, factor: float) -> None:
    """Multiply elements in place.

    Args:
        flat: one dimension; of `numpy_type(dtype)`.
        factor: >= 0; 0 makes everything zero, also what is not finite.
    """
    if factor == 1.0:
        return
    if factor == 0.0:
        flat.fill(0)
    elif dtype is DType.BFLOAT16:
        flat[...] = _to_bfloat16(_from_bfloat16(flat) * numpy().float32(factor))
    elif dtype is DType.FLOAT16:  # NOT by a factor that was rounded to it
        flat[...] = flat.astype(numpy().float32) * numpy().float32(factor)
    else:
        flat *= flat.dtype.type(factor)


def not_finite(flat: Any, dtype: DType) -> int | None:
    """The index of the first infinity or NaN; None if there is none.

    Args:
        flat: one dimension; of `numpy_type(dtype)`.
    """
    if flat.dtype.kind not in "fc" and dtype is not DType.BFLOAT16:
        return None
    finite = flat & 0x7F80 != 0x7F80 if dtype is DType.BFLOAT16 else numpy().isfinite(flat)
    return None if finite.all() else int(finite.argmin())


def _from_bfloat16(bits: Any) -> Any:
    np = numpy()
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Any) -> Any:
    """Rounded to the nearest, ties to even; a NaN stays one."""
    np = numpy()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
