"""Subjects: the averager, step and buffer of a call, so that unrelated sums never meet."""

from __future__ import annotations

import weakref
from typing import Final

# As in native/engine/segments/subject.h.
_N_NUMBERS: Final = 255
_N_STEPS: Final = 1 << 14
_N_BUFFERS: Final = 1 << 10


class Subject:
    """An averager of a group. Its `number` counts from 1 and is equal on all ranks.

    `what` describes the averaged values for people; `step` is the current step, from 1 on. If
    `keeps`, reducers keep residuals under its number.
    """

    def __init__(self, number: int, what: str, *, keeps: bool = False) -> None:
        self.number = (number - 1) % _N_NUMBERS + 1
        self.what = what
        self.keeps = keeps
        self.step = 0

    def of(self, buffer: int) -> int:
        """Return the `subject` of a call for this buffer.

        Step numbers that do not fit wrap to 2, NOT 1: in step 1 reducers drop their residuals.
        """
        step = self.step if self.step < _N_STEPS else 2 + (self.step - 2) % (_N_STEPS - 2)
        return self.number << 24 | step << 10 | buffer % _N_BUFFERS


class Subjects:
    """The subjects of one group."""

    def __init__(self) -> None:
        self._n = 0
        self._held: weakref.WeakSet[Subject] = weakref.WeakSet()

    def add(self, what: str, *, keeps: bool = False) -> Subject:
        """Add the next averager; every rank adds the same averagers in the same order."""
        self._n += 1
        subject = Subject(self._n, what, keeps=keeps)
        self._held.add(subject)
        return subject

    def rival(self, subject: Subject) -> Subject | None:
        """Return a living averager whose residuals reducers would mix with this one's, or None."""
        same = (one for one in self._held if one.number == subject.number and one is not subject)
        return next((one for one in same if one.keeps and subject.keeps), None)

    def describe(self, error: str) -> str:
        """Describe the averagers that an error names."""
        named = [one for one in self._held if f"for averager {one.number}, " in error]
        return "".join(
            f"; averager {one.number} averages {one.what}, and is in step {one.step} here"
            for one in sorted(named, key=lambda one: one.number)
        )
