"""Uneven inputs: some ranks have run out of theirs."""

from __future__ import annotations

from typing import Any


class Joined:
    """That some ranks have run out of inputs, as torch's Join context tells a reducer.

    Args:
        work: sums over all ranks whether they still have inputs.
        divide_by_size: gradients are divided by the number of all ranks, not of those that have.
            Where ranks have weights neither counts: one that has run out weighs 0.
    """

    def __init__(self, work: Any, divide_by_size: bool) -> None:
        self._work = work
        self._divide_by_size = divide_by_size

    def factor(self, size: int, *, is_weighted: bool) -> float:
        """By what an average over `size` ranks must be multiplied."""
        if self._divide_by_size or is_weighted:
            return 1.0
        self._work.wait()
        return size / float(self._work.result()[0].item())
