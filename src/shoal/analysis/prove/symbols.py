"""Symbols in place of numbers: the contributions in a value, and the order of their folds."""

from __future__ import annotations

from typing import TypeAlias, Union

from shoal.errors import ProofError

Expression: TypeAlias = Union[int, "tuple[Expression, Expression]"]
"""The fold of a value: a rank's own contribution, or (held value, value folded in)."""


class Symbols:
    """Values as plain numbers. Equal numbers mean the same contributions in the same order.

    A value holds contributions to one chunk: a bit per rank. If `idempotent`, a contribution may be
    folded in again. Known values are never built again, so a fold costs one look-up.
    """

    def __init__(self, idempotent: bool = False) -> None:
        self._idempotent = idempotent
        self.chunk: list[int] = []
        self.ranks: list[int] = []
        self.finished: list[bool] = []
        self.expression: list[Expression] = []
        self._known: dict[tuple[int, int], int] = {}

    def own(self, rank: int, chunk: int) -> int:
        """Return the own contribution of `rank` to `chunk`."""
        key = (-1 - rank, chunk)
        if key not in self._known:
            self._known[key] = self._new(chunk, 1 << rank, False, rank)
        return self._known[key]

    def fold(self, held: int, folded: int) -> int:
        """Return `held` with `folded` folded into it."""
        key = (held, folded)
        if key not in self._known:
            self._check_fold(held, folded)
            ranks = self.ranks[held] | self.ranks[folded]
            how = (self.expression[held], self.expression[folded])
            self._known[key] = self._new(self.chunk[held], ranks, False, how)
        return self._known[key]

    def finish(self, held: int) -> int:
        """Return `held`, marked as completely folded."""
        key = (held, -1)
        if key not in self._known:
            if self.finished[held]:
                raise ProofError(f"finishes {self.name(held)} again")
            how = self.expression[held]
            self._known[key] = self._new(self.chunk[held], self.ranks[held], True, how)
        return self._known[key]

    def name(self, value: int) -> str:
        """Return the name of a value for messages."""
        finished = ", finished" if self.finished[value] else ""
        return f"chunk {self.chunk[value]} of rank {_listed(self.ranks[value])}{finished}"

    def _check_fold(self, held: int, folded: int) -> None:
        twice = self.ranks[held] & self.ranks[folded]
        if self.chunk[held] != self.chunk[folded]:
            why = "they are different chunks"
        elif self.finished[held] or self.finished[folded]:
            why = "nothing may be folded after Finish"
        elif twice and not self._idempotent:
            why = f"rank {_listed(twice)} twice"
        else:
            return
        raise ProofError(f"folds {self.name(folded)} into {self.name(held)}: {why}")

    def _new(self, chunk: int, ranks: int, finished: bool, expression: Expression) -> int:
        self.chunk.append(chunk)
        self.ranks.append(ranks)
        self.finished.append(finished)
        self.expression.append(expression)
        return len(self.chunk) - 1


def mask_of(ranks: range) -> int:
    """Return a mask with a bit for each rank of a range."""
    return ((1 << len(ranks)) - 1) << ranks.start


def _listed(mask: int) -> str:
    return ", ".join(str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1)
