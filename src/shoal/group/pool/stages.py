"""Which calls are made with which servers: every worker numbers its calls alike. No I/O.

A stage begins with a call and lasts until the next one begins; its view is who serves it. To begin
one, each worker proposes the number that its next call will have, and holds back its calls from
there on until the highest proposal is known: with that call it begins, on every worker.
"""

from __future__ import annotations

from typing import Generic, TypeVar

View = TypeVar("View")


class Stages(Generic[View]):
    """The calls of one worker, and the stages that they belong to.

    Threads: none of its own; the caller locks.
    """

    def __init__(self) -> None:
        self.next_number = 0
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

    @property
    def holds(self) -> bool:
        """Whether the next call has to wait."""
        return self._held_from is not None and self.next_number >= self._held_from

    def propose(self) -> int:
        """Hold back calls from the next on, if the last stage has begun; returns from which on."""
        self._held_from = max(self.next_number, self.last_begin)
        return self._held_from

    def begin(self, number: int, view: View | None) -> None:
        """From this call on, the highest that anyone proposed, `view` serves; hold back no more."""
        if self._held_from is None or number < self._held_from:
            raise ValueError(f"a stage from call {number} on; proposed was {self._held_from}")
        self._held_from = None
        # The stages of calls that are made are of no use any more, but for the one that goes on.
        while len(self._stages) > 1 and self._stages[1][0] <= self.next_number:
            del self._stages[0]
        self._stages.append((number, view))

    def claim(self) -> tuple[int, View | None]:
        """The number of the call that is made now, and who serves it."""
        if self.holds:
            raise ValueError(f"call {self.next_number} is held back")
        number = self.next_number
        self.next_number += 1
        return number, next(view for begin, view in reversed(self._stages) if begin <= number)
