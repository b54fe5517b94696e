"""Whether ranks still hold the same: hashes are compared, and what differs is named."""

from __future__ import annotations

import ctypes
import itertools
import json
import operator
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.average.agreeing import texts_that_differ, unlike
from shoal.average.shared import shared_by
from shoal.errors import UsageError
from shoal.group.buffers import span_of

if TYPE_CHECKING:
    from shoal.group.group import Group


class SameCheck:
    """Compares named values over all ranks of a group, every so many steps.

    Args:
        every: steps; 0: never.

    Raises:
        UsageError: that is no number of steps.
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

        A small all-gather where all are the same; what they are is sent only where they are not.

        Args:
            values: each with its name: memory, as `span_of` takes it, or numbers, strings and
                lists of them.

        Raises (on every rank; the group goes on):
            UsageError: names the first value that differs, and which ranks hold what.
        """
        held = {name: _in_words(value) for name, value in values}
        texts = texts_that_differ(self._group, self._name, json.dumps(held).encode())
        told = [json.loads(text) for text in texts]
        for name in dict.fromkeys(itertools.chain.from_iterable(told)):
            if found := unlike([one.get(name, "nothing") for one in told]):
                raise UsageError(
                    f"{self._group}: {name} is not the same on all ranks in step {step}: {found}; "
                    "the ranks have drifted apart: look for what changed it on some of them only, "
                    "and go on from a state that all ranks share"
                )
        if told:
            raise UsageError(
                f"{self._group}: ranks name what they compare in other orders in step {step}; name "
                "it alike on every rank"
            )


def checked_interval(every: int) -> int:
    """A number of steps, or 0.

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
    """A number as it is; memory as its type, length and hash."""
    if value is None or isinstance(value, (bool, int, float, complex, str, tuple, list)):
        return repr(value)
    span = span_of(value, writable=False)
    memory = (ctypes.c_char * span.n_bytes).from_address(span.address) if span.n_elems else b""
    # NOT a cryptographic hash, which takes 4 to 9 times as long: nobody lies here.
    return f"{span.dtype}[{span.n_elems}] of hash {zlib.crc32(memory):08x}"
