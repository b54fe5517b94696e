"""Compares the values that ranks hold by hashes, and names the first that differs."""

from __future__ import annotations

import ctypes
import operator
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.average.agreeing import difference_among, shared_by
from shoal.errors import UsageError
from shoal.group.buffers import span_of

if TYPE_CHECKING:
    from shoal.group.group import Group


class SameCheck:
    """Compares named values over all ranks of a group, in every n-th step.

    Args:
        every: the number of steps n; 0: never.

    Raises:
        UsageError: it is not a number of steps.
    """

    def __init__(self, group: Group, every: int) -> None:
        self._group = group
        self._name = f"same {next(shared_by(group).names)}"
        self.every = checked_interval(every)

    def is_due(self, step: int) -> bool:
        """True if values are compared after this step, the first being 1."""
        return self.every > 0 and step % self.every == 0

    def compare(self, values: Iterable[tuple[str, Any]], step: int) -> None:
        """Compare values with those of all other ranks; every rank calls it.

        A small all-gather where all are the same; the values are sent only where they are not.

        Args:
            values: each with its name: memory, as `span_of` takes it, or numbers, strings and
                lists of them.

        Raises (on every rank; the group goes on):
            UsageError: names the first value that differs, and which ranks hold what.
        """
        held = {name: _in_words(value) for name, value in values}
        if found := difference_among(self._group, self._name, held):
            raise UsageError(
                f"{self._group}: in step {step} {found}; the ranks have drifted apart: look for "
                "what changed it on some of them only, and go on from a state that all ranks share"
            )


def checked_interval(every: int) -> int:
    """Return a number of steps, or 0.

    Raises:
        UsageError: it is neither.
    """
    try:
        found = operator.index(every)
    except TypeError:
        found = -1
    if found < 0:
        raise UsageError(
            f"check_same must be a whole number of steps, or 0 for never, got {every!r}"
        )
    return found


def _in_words(value: Any) -> str:
    """Describe a number as it is, and memory by its type, length and hash."""
    if value is None or isinstance(value, (bool, int, float, complex, str, tuple, list)):
        return repr(value)
    span = span_of(value, writable=False)
    memory = (ctypes.c_char * span.n_bytes).from_address(span.address) if span.n_elems else b""
    # NOT a cryptographic hash, which takes 4 to 9 times as long: no rank lies here.
    return f"{span.dtype}[{span.n_elems}] of hash {zlib.crc32(memory):08x}"
