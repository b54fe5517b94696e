"""Which calls are made with which servers: every worker numbers its calls alike. No I/O.

A stage begins with a call and lasts until the next one begins; its view is who serves it. To begin
one, each worker proposes the number after the highest that a call of its own has had, and holds
back calls from there on until the highest proposal is known: with that call it begins, on every
worker. Numbers may be used in any order, another one on each worker.
"""

from __future__ import annotations

from typing import Generic, TypeVar

View = TypeVar("View")


class Stages(Generic[View]):
    """The calls of one worker, and the stages that they belong to.

    Threads: none of its own; the caller locks.
    """

    def __init__(self) -> None:
        self._after_highest = 0
        self._stages: list[tuple[int, View | None]] = [(0, None)]
        self._held_from: int | None = None

    @property
    def last_begin(self) -> int:
        """The call with which the last stage begins, whether it was made or not."""
        return self._stages[-1][0]

    @property
    def last(self) -> View | None:
        """Who serves the last stage."""
        return self._stages[-1][1]

    def holds(self, number: int) -> bool:
        """Whether this call has to wait."""
        return self._held_from is not None and number >= self._held_from

    def propose(self) -> int:
        """Hold back calls after all that were made, if the last stage has begun.

        Returns:
            From which on.
        """
        self._held_from = max(self._after_highest, self.last_begin)
        return self._held_from

    def begin(self, number: int, view: View | None, lowest_open: int) -> None:
        """From this call on, the highest that anyone proposed, `view` serves; hold back no more.

        Args:
            lowest_open: of the calls that may yet be made.
        """
        if self._held_from is None or number < self._held_from:
            raise ValueError(f"a stage from call {number} on; proposed was {self._held_from}")
        self._held_from = None
        # The stages of calls that are made are of no use any more, but for the one that goes on.
        while len(self._stages) > 1 and self._stages[1][0] <= lowest_open:
            del self._stages[0]
        self._stages.append((number, view))

    def release(self) -> None:
        """Hold back nothing any more: nobody agrees on another stage."""
        self._held_from = None

    def of(self, number: int) -> View | None:
        """Who serves a call, if it is not held back."""
        return next(view for begin, view in reversed(self._stages) if begin <= number)

    def claim(self, number: int) -> View | None:
        """This call is made now; who serves it."""
        if self.holds(number):
            raise ValueError(f"call {number} is held back")
        self._after_highest = max(self._after_highest, number + 1)
        return self.of(number)
