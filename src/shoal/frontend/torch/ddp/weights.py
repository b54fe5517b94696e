"""Weights of passes whose gradients are summed up before they are averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


class SharedWeights:
    """The one weight that passes in no_sync have: their sum is averaged as one.

    Args:
        has_sums: whether gradients of passes before are there.
        refuse: raises UsageError with these words, and has other ranks hear them.
    """

    def __init__(self, has_sums: Callable[[], bool], refuse: Callable[[str], NoReturn]) -> None:
        self._weight: float | None = None
        self._has_sums = has_sums
        self._refuse = refuse

    def note_forward(self, weight: float, outputs: Sequence[torch.Tensor]) -> None:
        """A forward pass with this weight has ended: what comes back by its outputs is summed."""
        hooked = [output for output in outputs if output.grad_fn is not None]
        for output in hooked:
            output.register_hook(functools.partial(self._add, weight))  # type: ignore[no-untyped-call]
        if not hooked:
            self._add(weight)

    def _add(self, weight: float, *_: object) -> None:
        self.check(weight)
        self._weight = weight

    def check(self, weight: float | None) -> None:
        """Gradients of a pass with this weight come.

        Raises:
            UsageError: they are added to those of passes with another one.
        """
        if self._weight in (None, weight) or not self._has_sums():
            return
        self._refuse(
            f"gradients of passes in no_sync() with weigh({self._weight}) and of one with "
            f"weigh({weight}) are summed up here, and a sum has one weight: give all passes of a "
            "step the number of samples or tokens of the whole step on this rank, and divide the "
            "sum of each loss by that number"
        )

    def clear(self) -> None:
        """The sum has been averaged."""
        self._weight = None
