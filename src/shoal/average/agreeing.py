"""Lets the averagers of a group agree on names, arrays, their order, and values."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import operator
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import ShoalError, UsageError
from shoal.group.buffers import span_of
from shoal.plan.text import ranks_of

if TYPE_CHECKING:
    from shoal.average.layout import ArraySpec
    from shoal.engine import Countdown
    from shoal.group.group import Group
    from shoal.group.work import Work

_N_DIGEST_BYTES: Final = 32
_MOST_TEXT_BYTES: Final = 1 << 28


def agree(group: Group, name: str, entries: Sequence[ArraySpec], options: dict[str, Any]) -> None:
    """Compare arrays and options, of JSON's types, with all other ranks; every rank calls it.

    Costs one small all-gather if all agree. If not, UsageError on every rank names the first
    difference and the ranks; the group stays usable.
    """
    arrays = {repr(entry.name): f"{entry.dtype}{list(entry.shape)}" for entry in entries}
    order = {f"array {at}": repr(entry.name) for at, entry in enumerate(entries)}
    given = arrays | order | {key: str(value) for key, value in options.items()}
    if found := difference_among(group, name, given):
        raise UsageError(f"{group}: {found}; pass the same on every rank")


def difference_among(
    group: Group, name: str | None, values: Mapping[str, str], timeout_s: float | None = None
) -> str:
    """Name the first of these values that differs among ranks, and each rank's value; or "".

    Every rank calls it. Gathers hashes, and the values only if the hashes differ.
    """
    text = json.dumps(values).encode()
    digest = bytearray(hashlib.blake2b(text, digest_size=_N_DIGEST_BYTES).digest())
    digests = bytearray(group.size * _N_DIGEST_BYTES)
    group.all_gather(digests, digest, name=name, timeout_s=timeout_s)
    if digests == digest * group.size:
        return ""
    return difference([json.loads(one) for one in texts_of_all(group, name, text, timeout_s)])


def texts_of_all(
    group: Group, name: str | None, text: bytes, timeout_s: float | None = None
) -> list[bytes]:
    """Return the text of every rank, by rank; every rank calls it.

    Raises ShoalError on every rank if the length from a rank is out of range.
    """
    lengths = array("q", bytes(8 * group.size))
    group.all_gather(lengths, array("q", [len(text)]), name=name, timeout_s=timeout_s)
    for rank, n_bytes in enumerate(lengths):
        if not 0 <= n_bytes <= _MOST_TEXT_BYTES:
            raise ShoalError(
                f"{group}: rank {rank} announced a text of {n_bytes} bytes; the limit is "
                f"{_MOST_TEXT_BYTES}. Its memory may be damaged: look at that machine"
            )
    texts = [bytearray(n_bytes) for n_bytes in lengths]
    group.all_gather(texts, bytearray(text), name=name, timeout_s=timeout_s)
    return [bytes(one) for one in texts]


def difference(given: Sequence[Mapping[str, str]]) -> str:
    """Name the first value that differs among ranks, and the ranks that have each value.

    Args:
        given: by rank, the values by name; ranks differ.
    """
    for name in dict.fromkeys(itertools.chain.from_iterable(given)):
        by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(given):
            by_value.setdefault(values.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            sides = ", ".join(f"{value} on {ranks_of(ranks)}" for value, ranks in by_value.items())
            return f"{name} is not the same on all ranks: {sides}"
    return "the order of these names is not the same on all ranks"


class Shared:
    """Numbers for the names of a group's averagers, and calls that dropped averagers did not make.

    Attributes:
        names: numbers for names; all ranks create averagers in the same order.
        dropped: the numbers of calls to skip, from steps in which an averager was dropped.
    """

    def __init__(self) -> None:
        self.names = itertools.count()
        self.dropped: deque[set[int]] = deque()

    def drop(self, numbers: set[int], countdown: Countdown) -> None:
        """Record that an averager was dropped; its hooks do nothing from now on.

        Does NOT skip the calls now: the garbage collector may run under the lock that this takes.
        """
        countdown.paused = True
        self.dropped.append(numbers)


_SHARED: Final[weakref.WeakKeyDictionary[Group, Shared]] = weakref.WeakKeyDictionary()


def shared_by(group: Group) -> Shared:
    """Return the state shared by this group's averagers; does not keep the group alive."""
    return _SHARED.setdefault(group, Shared())


class FirstOrder:
    """Broadcasts the order of the first step; every rank calls it at the same places in a step.

    Args:
        is_known: all ranks know the order already, so nothing is sent.
    """

    def __init__(self, group: Group, name: str, *, is_known: bool = False) -> None:
        self._group = group
        self._name = name
        self._is_sent = is_known
        self._coming: tuple[Work | None, bytearray] | None = None

    @property
    def is_known(self) -> bool:
        """True if the order has arrived, or the layout is kept."""
        return self._is_sent and self._coming is None

    def end_step(self, came: Sequence[int], last: Sequence[int]) -> None:
        """Send the order of arrays after the first step; later steps send nothing.

        Args:
            came: the arrays that became ready, in this order.
            last: the layout's order, for the other arrays.
        """
        if self._is_sent:
            return
        missing = set(last).difference(came)
        order = bytearray(array("I", [*came, *(one for one in last if one in missing)]).tobytes())
        work = self._group.broadcast(order, 0, name=self._name, async_op=True)
        if work is not None:
            work.finish_at_close()  # the program may end after this step
        self._coming, self._is_sent = (work, order), True

    def keep(self) -> None:
        """Send no order: the layout stays. Every rank calls it before the first step."""
        self._is_sent = True

    def take(self) -> tuple[int, ...] | None:
        """Return the order from the step that sent it until `forget`; waits until it arrives."""
        if self._coming is None:
            return None
        work, data = self._coming
        if work is not None:
            work.wait()
        order = array("I")
        order.frombytes(data)
        return tuple(order)

    def forget(self) -> None:
        """Forget the order, which was used."""
        self._coming = None


# ---- values that should be the same on all ranks ----


class SameCheck:
    """Compares named values over all ranks in every `every`-th step, from 1; 0: never."""

    def __init__(self, group: Group, every: int) -> None:
        self._group = group
        self._name = f"same {next(shared_by(group).names)}"
        self._every = every

    def compare(self, values: Iterable[tuple[str, Any]], step: int) -> None:
        """Compare named values with all other ranks if the step is due; every rank calls it.

        Values are memory, as `span_of` takes it, numbers, strings and lists of them. They are sent
        only if their hashes differ. UsageError on every rank then names the first difference and
        the ranks.
        """
        if not self._every or step % self._every:
            return
        held = {name: _in_words(value) for name, value in values}
        if found := difference_among(self._group, self._name, held):
            raise UsageError(
                f"{self._group}: in step {step} {found}; the ranks have drifted apart: find "
                "the code that changed it on some ranks only, and continue from a common state"
            )


def checked_interval(every: int) -> int:
    """Return a number of steps, or 0 for never; UsageError if it is neither."""
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
    """Describe a number by its value, and memory by its type, length and hash."""
    if isinstance(value, (tuple, list)):  # NOT repr, which leaves out elements of long arrays
        return f"{type(value).__name__}({', '.join(map(_in_words, value))})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    span = span_of(value, writable=False)
    memory = (ctypes.c_char * span.n_bytes).from_address(span.address) if span.n_elems else b""
    # NOT a cryptographic hash, which takes 4 to 9 times as long: ranks trust each other.
    return f"{span.dtype}[{span.n_elems}] of hash {zlib.crc32(memory):08x}"
