"""Wrappers that share parameters: a gradient counts for that whose backward pass is under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from shoal.frontend.torch.ddp.keeper import Averaging
    from shoal.frontend.torch.ddp.weights import SharedWeights


class OtherKeeper(Protocol):
    """Who counts gradients: of a wrapper."""

    averaging: Averaging
    summed: SharedWeights
    turn: SharedTurn

    @property
    def is_in_pass(self) -> bool:
        """Whether its backward pass is under way."""

    @property
    def has_raised(self) -> bool:
        """Whether the last one raised in its middle."""


class SharedTurn:
    """Has others count nothing while one's backward pass is under way.

    Args:
        refuse: raises UsageError with these words, and has other ranks hear them.
    """

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self._refuse = refuse
        self._others: weakref.WeakKeyDictionary[OtherKeeper, str] = weakref.WeakKeyDictionary()
        self._stopped: list[Averaging] = []
        self._is_told = True  # by outputs of the last forward pass, when its backward pass begins

    @property
    def others(self) -> list[OtherKeeper]:
        """Those with which it shares parameters."""
        return list(self._others)

    def share(self, other: OtherKeeper, name: str) -> None:
        """Another one averages this parameter too. What it has begun is over."""
        other.averaging.stop()
        self._others[other] = name

    def note_forward(self, *, is_told: bool) -> None:
        """A forward pass has ended.

        Args:
            is_told: one of its outputs tells when a backward pass begins.

        Raises:
            UsageError: nobody could tell whose gradients are those that come.
        """
        self._is_told = is_told
        self.end()
        for other, name in self._others.items():
            if other.averaging.is_armed and not (is_told and other.turn._is_told):
                self._refuse(
                    f"parameter {name} is another wrapper's too, of which a forward pass has no "
                    "backward pass yet; and one of both is in no_sync(), or no tensor was found in "
                    "its output: have the backward pass first, or that forward pass in no_grad()"
                )

    def begin(self) -> None:
        """A backward pass begins: from now on others count nothing.

        Raises:
            UsageError: the same pass is another one's too, or that one's step is not over.
        """
        for other, name in self._others.items():
            if other.is_in_pass:
                self._refuse(
                    f"parameter {name} is in two wrapped models, and one backward pass goes "
                    "through both: have a backward pass for the loss of each, or wrap one model "
                    "that has both as its parts"
                )
            if other.averaging.is_armed:
                if other.averaging.has_begun and not other.has_raised:
                    self._refuse(
                        f"parameter {name} is another wrapper's too, of whose gradients some are "
                        "on their way: have all backward passes of its forward pass first"
                    )
                other.averaging.stop()
                self._stopped.append(other.averaging)

    def end(self) -> None:
        """The pass has ended: others go on where they were."""
        while self._stopped:
            self._stopped.pop().resume()
