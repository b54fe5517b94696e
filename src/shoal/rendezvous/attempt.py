"""The attempts to meet at one store: which attempt a rank joins, and why an attempt has ended.

A store may outlive a group, and a rank may be started again. So each attempt has its own keys, and
a process joins the last attempt that has not ended. If that attempt has a record of its rank, the
record is a leftover: the process ends the attempt and joins the next one. The other ranks look for
the end of their attempt while they wait, and follow. A rank that cannot join ends the attempt with
its error. Ranks of that attempt raise it; ranks of later attempts report it while they wait.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.engine import HANDSHAKE_VERSION
from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.packing import number, seal, text_field, unpack
from shoal.rendezvous.record import MAX_SIZE, decode
from shoal.rendezvous.store.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.rendezvous.store import Store

_KIND: Final = b"shoal/en"
_LAST_KIND: Final = b"shoal/at"
# Seconds that a failed join waits for the store, to find the missing ranks and to report its error
# to the others.
LAST_WORDS_S: Final = 0.5
_N_REASON: Final = 500  # characters
_N_LABEL: Final = 64
_AGAIN, _LOST, _USAGE = range(3)
_MOST_ATTEMPTS: Final = 10**9 - 1  # nine digits in keys
_NOBODY_CAN: Final = "cannot join, so nobody can: "

# The number of the last attempt, or of an earlier one if two ranks wrote at once.
ATTEMPT_KEY: Final = "shoal/attempt"


def record_key(attempt: int, rank: int) -> str:
    """Return the store key of a rank's record."""
    return f"shoal/{attempt}/rank/{rank}"


def find_record_key(key: str) -> tuple[int, int] | None:
    """Return the attempt and the rank of a `record_key`; None for any other key."""
    found = re.fullmatch(r"shoal/([0-9]{1,9})/rank/([0-9]{1,7})", key)
    return None if found is None else (int(found[1]), int(found[2]))


def part_key(attempt: int, part: int) -> str:
    """Return the store key of a part of the roll."""
    return f"shoal/{attempt}/roll/{part}"


def differs_key(attempt: int, rank: int) -> str:
    """Return the store key by which rank 0 confirms that it read a record of another size."""
    return f"shoal/{attempt}/differs/{rank}"


def end_key(attempt: int) -> str:
    """Return the store key by which a rank ends an attempt."""
    return f"shoal/{attempt}/end"


class AttemptOverError(Exception):
    """This attempt has ended, and the next one is open."""


class PlaceTakenError(UsageError):
    """Another process of this rank joined; its record is `value`."""

    def __init__(self, rank: int, value: bytes) -> None:
        found = decode(value)
        where = "" if found is None else f", on {found.host_label}"
        super().__init__(
            f"another process joined as rank {rank}{where}: every process needs its own RANK"
        )


class End(NamedTuple):
    """Why an attempt has ended.

    Args:
        rank: the rank that has ended it, on the host `host_label`; -1 and empty if they are not
            known.
        kind: `_AGAIN`, all meet again; `_LOST` or `_USAGE`, the rank cannot join.
    """

    rank: int
    host_label: str
    kind: int
    reason: str

    @classmethod
    def of(cls, rank: int, label: str, kind: int, reason: str) -> End:
        """Return an end with its texts cut to fit a value of the store."""
        return cls(rank, _ascii(label, _N_LABEL), kind, _ascii(reason, _N_REASON))

    @classmethod
    def lost(cls, rank: int, label: str, reason: str) -> End:
        """Return the end of an attempt in which this rank was lost."""
        return cls.of(rank, label, _LOST, reason)

    @property
    def is_failure(self) -> bool:
        """True if the rank cannot join unless it is started again."""
        return self.kind != _AGAIN

    def error(self) -> ShoalError:
        """Return the error that the other ranks of the attempt raise."""
        if self.kind == _USAGE:
            who = f"rank {self.rank} on {self.host_label}"
            return UsageError(f"{who} {_NOBODY_CAN}{self.reason}")
        reason = f"has left the meeting: {self.reason}"
        return PeerLost(self.rank, self.host_label, "", "joining", reason)

    def encode(self) -> bytes:
        """Return the end as a value for the store."""
        body = number(self.rank + 1, 4) + number(self.kind, 1) + text_field(self.host_label)
        return seal(_KIND, HANDSHAKE_VERSION, body + self.reason.encode())


def is_of_another_rank(error: ShoalError) -> bool:
    """Return True if this rank cannot join because of another rank."""
    return not isinstance(error, UsageError) or _NOBODY_CAN in str(error)


_DAMAGED: Final = End(0, "", _AGAIN, "damaged in the store")


def decode_end(value: bytes) -> End:
    """Return the end in this value; for a damaged value, an end after which all meet again."""
    try:
        data = unpack(_KIND, value)
        rank, kind = data.number(4, 0, MAX_SIZE) - 1, data.number(1, _AGAIN, _USAGE)
        found = End(rank, data.text(), kind, data.rest().decode())
    except ValueError:
        return _DAMAGED
    return found if found.reason.isprintable() else _DAMAGED


def find_end(store: Store, attempt: int) -> End | None:
    """Return the end of this attempt; None if it has not ended."""
    value = store.try_get(end_key(attempt))
    return None if value is None else decode_end(value)


class Attempt(NamedTuple):
    """An attempt, and the end of the attempt before it."""

    number: int = 0
    before: End | None = None


def find_attempt(store: Store, rank: int, label: str, left: int = -1) -> Attempt:
    """Return the attempt that this rank joins: the last one, without a record of this rank.

    If this process was in attempt `left` (-1: in no attempt), raises PlaceTakenError for another
    process of its rank, and ShoalError if a rank has failed since.
    """
    attempt = left + 1 if left >= 0 else _last(store)
    while True:
        end = find_end(store, attempt)
        if end is None:
            value = store.try_get(record_key(attempt, rank))
            if value is None:
                break
            if left >= 0:
                raise PlaceTakenError(rank, value)
            meet_again(store, attempt, rank, label, "was started again")
        elif end.is_failure and left >= 0:
            raise end.error()
        attempt += 1
    return Attempt(attempt, find_end(store, attempt - 1) if attempt else None)


def end_attempt(store: Store, attempt: int, end: End) -> None:
    """End an attempt, unless another rank has ended it, and open the next one."""
    if store.try_get(end_key(attempt)) is None:
        store.set(end_key(attempt), end.encode())
    if _last(store) <= attempt:
        store.set(ATTEMPT_KEY, seal(_LAST_KIND, HANDSHAKE_VERSION, number(attempt + 1, 4)))


def meet_again(store: Store, attempt: int, rank: int, label: str, why: str) -> None:
    """End an attempt, so that all meet again."""
    end_attempt(store, attempt, End.of(rank, label, _AGAIN, why))


def report_failure(
    asked: Asking, rank: int, label: str, error: BaseException, attempt: int | None = None
) -> None:
    """End the attempt with this rank's error, if the store takes it in time.

    Args:
        attempt: the attempt that this rank has joined; None: none, so end the last one.
    """
    kind = _USAGE if isinstance(error, UsageError) else _LOST
    why = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__} {error}"
    asked.deadline = time.monotonic() + LAST_WORDS_S
    with contextlib.suppress(Exception):  # the store may be gone, or the cause of the error
        last = _last(asked) if attempt is None else attempt
        while (end := find_end(asked, last)) is not None:
            if attempt is not None and end.is_failure:
                return  # the others do not wait any more
            last += 1
            is_taken = attempt is not None and asked.try_get(record_key(last, rank)) is not None
            if is_taken and not isinstance(error, PlaceTakenError):
                return  # another process of this rank goes on
        end_attempt(asked, last, End.of(rank, label, kind, why))


@contextlib.contextmanager
def reporting_failure(store: Store, rank: int, size: int) -> Iterator[None]:
    """Report errors of the block, which runs before `join`, as `join` reports its own."""
    try:
        yield
    except BaseException as error:
        if size > 1 and 0 <= rank < size:
            with contextlib.closing(Asking(store, 0.0)) as asked:
                report_failure(asked, rank, JoinOptions().label, error)
        raise


def _last(store: Store) -> int:
    try:
        value = store.try_get(ATTEMPT_KEY) or b""
        return unpack(_LAST_KIND, value).number(4, 0, _MOST_ATTEMPTS)
    except ValueError:
        return 0  # missing or damaged


def _ascii(text: str, n_chars: int) -> str:
    """Return the text as one line of printable ASCII."""
    text = " ".join(text.split()).encode("ascii", "replace").decode("ascii")
    return "".join(char if char.isprintable() else "?" for char in text)[:n_chars]
