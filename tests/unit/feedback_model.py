"""What error feedback means, in NumPy: all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, Any]


def to_bf16(arrays: Arrays) -> Arrays:
    """Round each value to bfloat16."""
    return {n: one.astype(ml_dtypes.bfloat16).astype(np.float32) for n, one in arrays.items()}


class FeedbackModel:
    """The residuals of all ranks, and the averages of each step.

    Args:
        shapes: of all arrays of float32, by name.
        rounding: what the codec makes of what one rank sends; arrays by name.
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
        """The averages; of arrays that no rank gives there are none.

        Args:
            given: by rank; an array that is left out counts as zero.
            factors: what the values of each rank are multiplied by.
        """
        names = [name for name in self.shapes if any(name in arrays for arrays in given)]
        sent, after = [], []
        for rank, arrays in enumerate(given):
            before = self.residuals[rank]
            factor = np.float32(1 if factors is None else factors[rank])
            whole = {n: arrays.get(n, np.float32(0)) * factor + before[n] for n in names}
            sent.append(self.rounding(whole))
            with np.errstate(invalid="ignore"):  # infinity less itself
                lost = {name: whole[name] - sent[-1][name] for name in names}
            after.append({**before, **lost})
        averages = {n: sum(one[n] for one in sent) / np.float32(len(given)) for n in names}
        if all(np.isfinite(average).all() for average in averages.values()):
            self.residuals = after
        return averages
