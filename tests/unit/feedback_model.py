"""A NumPy model of error feedback, for all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import mx
import numpy as np

if TYPE_CHECKING:
    from shoal.average import Averager

Arrays = dict[str, Any]


def to_bf16(arrays: Arrays) -> Arrays:
    """Round each value to bfloat16."""
    return {n: round_flat("bf16", one) for n, one in arrays.items()}


def round_flat(codec: str, values: Any) -> Any:
    """Round a complete buffer by a codec, or one value if it has no blocks."""
    if codec in mx.FORMATS:
        return mx.rounded(codec, values)
    kind = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[codec]
    with np.errstate(over="ignore"):
        return values.astype(kind).astype(np.float32)


def in_buffers(averager: Averager, flat: Callable[[Any], Any]) -> Callable[[Arrays], Arrays]:
    """Return a function that rounds arrays at their places in fusion buffers, zeros between.

    Args:
        flat: rounds the elements of a complete buffer.
    """

    def rounding(arrays: Arrays) -> Arrays:
        layout = averager.layout
        whole = np.zeros(layout.n_bytes // 4, np.float32)
        places = {
            entry.name: slice(place.offset // 4, place.end // 4)
            for entry, place in zip(layout.entries, layout.places, strict=True)
        }
        for name, one in arrays.items():
            whole[places[name]] = one.ravel()
        for _, extent, _ in layout.buffers:
            part = slice(extent.offset // 4, extent.end // 4)
            whole[part] = flat(whole[part])
        return {name: whole[places[name]].reshape(one.shape) for name, one in arrays.items()}

    return rounding


class FeedbackModel:
    """A model of the residuals of all ranks, and of the averages of each step.

    Args:
        shapes: of all arrays of float32, by name.
        rounding: rounds what one rank sends by the codec; arrays by name.
    """

    def __init__(
        self,
        size: int,
        shapes: Mapping[str, tuple[int, ...]],
        rounding: Callable[[Arrays], Arrays] = to_bf16,
    ) -> None:
        self.shapes = shapes
        self.rounding = rounding
        self.residuals = [
            {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            for _ in range(size)
        ]

    def step(self, given: list[Arrays], factors: list[float] | None = None) -> Arrays:
        """Return the averages of arrays that some rank gives.

        Args:
            given: by rank; a missing array counts as zero.
            factors: multiply the values of each rank.
        """
        names = [name for name in self.shapes if any(name in arrays for arrays in given)]
        sent, after = [], []
        for rank, arrays in enumerate(given):
            before = self.residuals[rank]
            factor = np.float32(1 if factors is None else factors[rank])
            whole = {n: arrays.get(n, np.float32(0)) * factor + before[n] for n in names}
            sent.append(self.rounding(whole))
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                lost = {name: whole[name] - sent[-1][name] for name in names}
            after.append({**before, **lost})
        averages = {n: sum(one[n] for one in sent) / np.float32(len(given)) for n in names}
        if all(np.isfinite(average).all() for average in averages.values()):
            self.residuals = after
        return averages
