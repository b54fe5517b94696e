"""Maps calls, by their numbers, to the views that serve them. No I/O.

Calls have the same numbers on every worker. A stage is the calls of one view, from a first number
up to the next stage. To begin a stage, each worker proposes the number after its highest call so
far, and holds back calls from there on. The stage begins with the highest proposal, on every
worker. Workers may use numbers in any order, each in a different one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

View = TypeVar("View")


class Stages(Generic[View]):
    """The stages of one worker's calls. Threads: the caller locks."""

    def __init__(self) -> None:
        self._after_highest = 0
        self._stages: list[tuple[int, View | None]] = [(0, None)]
        self._held_from: int | None = None

    @property
    def last(self) -> View | None:
        """The view of the last stage."""
        return self._stages[-1][1]

    def holds(self, number: int) -> bool:
        """Return True if this call is held back."""
        return self._held_from is not None and number >= self._held_from

    def propose(self) -> int:
        """Hold back calls after those made so far; return the first number held back."""
        last_begin, _ = self._stages[-1]  # that call may not be made yet
        self._held_from = max(self._after_highest, last_begin)
        return self._held_from

    def begin(self, number: int, view: View | None, lowest_open: int) -> None:
        """Let `view` serve from this call on, the highest proposal; stop holding back.

        Args:
            lowest_open: the lowest call that may still be made.
        """
        if self._held_from is None or number < self._held_from:
            raise ValueError(f"a stage begins at {number}, but the proposal was {self._held_from}")
        self._held_from = None
        # Drop the stages whose calls were all made.
        while len(self._stages) > 1 and self._stages[1][0] <= lowest_open:
            del self._stages[0]
        self._stages.append((number, view))

    def release(self) -> None:
        """Stop holding back: the workers will not agree on another stage."""
        self._held_from = None

    def of(self, number: int) -> View | None:
        """Return the view of a call, which must not be held back."""
        return next(view for begin, view in reversed(self._stages) if begin <= number)

    def claim(self, number: int) -> View | None:
        """Record that a call is being made; return its view."""
        if self.holds(number):
            raise ValueError(f"call {number} is held back")
        self._after_highest = max(self._after_highest, number + 1)
        return self.of(number)
