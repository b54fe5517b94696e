"""Prepares a buffer before it is sent: scales it by the rank's weight, and checks it for NaNs.

float16 is divided by the number of ranks here, as in torch's wrapper, and then summed: a sum can be
infinite although the average is not.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from shoal.dtypes import DType, Op
from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from shoal.average.layout import Layout
    from shoal.group.group import Group
    from shoal.group.work import Work


class NotFinite(ShoalError, ArithmeticError):  # noqa: N818 - the name describes the values
    """A rank's values had an infinity or a NaN. Raised on every rank, and the step is over.

    The averages have it too, unless that rank's weight is 0. The group is usable.

    Args:
        name: the name of the array.
        rank: the rank with these values; the lowest of several.
        element: the index of a value that is not finite, in the flattened array.
    """

    def __init__(self, name: str, rank: int, element: int) -> None:
        super().__init__(name, rank, element)
        self.name = name
        self.rank = rank
        self.element = element

    def __str__(self) -> str:
        return (
            f"element {self.element} of {self.name!r} on rank {self.rank} was not finite before it "
            "was averaged: skip this step, or look at what that rank computed"
        )


class Preparation:
    """Prepares the buffers of one rank, step by step, for the averager of this name."""

    def __init__(self, group: Group, name: str, *, weighted: bool, check_finite: bool) -> None:
        numpy()
        self._group = group
        self._name = name
        self.is_weighted = weighted
        self._check_finite = check_finite
        self._total: array[float] | None = None  # sum of all weights, after this step's was sent
        self._summing: Work | None = None

    def lay_out(self, layout: Layout, memory: Any) -> None:
        """Prepare buffers of another layout from now on."""
        np = numpy()
        self._layout = layout
        self._flats = [
            np.frombuffer(memory, numpy_type(dtype), n_bytes // dtype.n_bytes, offset)
            for dtype, (offset, n_bytes), _ in layout.buffers
        ]

    def begin(self, weight: float | None) -> None:
        """Begin a step with this weight for this rank's values."""
        self._worst = (-1, 0)
        self._weight = 0.0 if weight is None else weight
        self._total = None
        self._factor: float | None = None

    @property
    def has_sent_weight(self) -> bool:
        """True if this step's weight has been sent to the other ranks."""
        return self._total is not None

    def send_weight(self, number: int, subject: int) -> None:
        """Sum the weights of all ranks in this call; every rank does so once in a step."""
        self._total = array("d", [self._weight])
        self._summing = self._group.all_reduce(
            self._total, Op.SUM, number=number, subject=subject, async_op=True
        )

    def prepare(self, buffer: int) -> None:
        """Prepare a buffer before it is sent."""
        if self._check_finite and self._worst[0] < 0:
            self._look(buffer)
        dtype = self._layout.buffers[buffer].dtype
        factor = self._factor_of_rank() if self.is_weighted else 1.0
        if dtype is DType.FLOAT16:
            factor /= self._group.size
        scale(self._flats[buffer], dtype, factor)

    def end(self) -> None:
        """End the step; every rank calls it.

        Every rank raises NotFinite if a rank had such values, or UsageError if all weights were 0.
        """
        if self._check_finite:
            self._raise_not_finite()
        if self.is_weighted and self._total_weight() <= 0:
            raise UsageError(f"{self._group}: the weights of all ranks are 0: there is no average")

    def _look(self, buffer: int) -> None:
        dtype, extent, entries = self._layout.buffers[buffer]
        if not_finite(self._flats[buffer], dtype) is None:
            return
        for index in entries:  # NOT the padding, which may hold old values
            at = not_finite(self._flats[buffer][self._layout.part(buffer, index)], dtype)
            if at is not None:
                before = max(0, extent.offset - self._layout.places[index].offset)
                self._worst = (index, before // dtype.n_bytes + at)
                return

    def _raise_not_finite(self) -> None:
        found = array("q", self._worst)
        everyone = array("q", bytes(16 * self._group.size))
        self._group.all_gather(everyone, found, name=f"{self._name}, not finite")
        for rank in range(self._group.size):
            index, element = everyone[2 * rank : 2 * rank + 2]
            if 0 <= index < len(self._layout.entries):
                raise NotFinite(self._layout.entries[index].name, rank, element)

    def _total_weight(self) -> float:
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
        assert self._total is not None  # sent when the step took its place among the calls
        return self._total[0]

    def _factor_of_rank(self) -> float:
        """Return this rank's weight over the mean weight of all ranks."""
        if self._factor is None:
            total = self._total_weight()
            self._factor = self._weight * self._group.size / total if total else 0.0
        return self._factor


# ---- elements as NumPy arrays ----

_NO_NUMPY: Final = "weights, check_finite and error feedback need NumPy: pip install numpy"


def numpy_type(dtype: DType) -> str:
    """Return the name of NumPy's dtype; uint16 for bfloat16, which NumPy does not have."""
    return {DType.BOOL: "bool", DType.BFLOAT16: "uint16"}.get(dtype, str(dtype))


def numpy() -> Any:
    """Return the module; UsageError if it is not installed."""
    try:
        import numpy as np
    except ImportError:
        raise UsageError(_NO_NUMPY) from None
    return np


def numpy_arrays(memory: Any, layout: Layout) -> dict[str, Any] | None:
    """Return all arrays by name, as NumPy arrays; None if NumPy is not installed."""
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
    """Multiply a flat array in place by a factor >= 0; 0 also clears infinities and NaNs."""
    if factor == 1.0:
        return
    if factor == 0.0:
        flat.fill(0)
    elif dtype is DType.BFLOAT16:
        flat[...] = _to_bfloat16(_from_bfloat16(flat) * numpy().float32(factor))
    elif dtype is DType.FLOAT16:  # NOT by a factor rounded to float16
        flat[...] = flat.astype(numpy().float32) * numpy().float32(factor)
    else:
        flat *= flat.dtype.type(factor)


def not_finite(flat: Any, dtype: DType) -> int | None:
    """Return the index of the first infinity or NaN; None if there is none.

    Args:
        flat: has one dimension and the dtype `numpy_type(dtype)`.
    """
    if flat.dtype.kind not in "fc" and dtype is not DType.BFLOAT16:
        return None
    finite = flat & 0x7F80 != 0x7F80 if dtype is DType.BFLOAT16 else numpy().isfinite(flat)
    return None if finite.all() else int(finite.argmin())


def _from_bfloat16(bits: Any) -> Any:
    np = numpy()
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Any) -> Any:
    """Round to the nearest, ties to even; a NaN stays a NaN."""
    np = numpy()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
