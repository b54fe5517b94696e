"""One attempt in the store: the records of all ranks, and the roll made of them.

Rank 0 reads all records and writes the roll; the others wait for it. No leftover record gets into a
group: two ranks can authenticate a link only under the same epoch, the epoch is a hash of all
nonces, and a rank uses a roll only if its own new nonce is in it. So once a rank is linked to all
others, directly or through others, each of them uses the same roll and is alive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.engine import HANDSHAKE_VERSION
from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.rendezvous.attempt import (
    Attempt,
    AttemptOverError,
    PlaceTakenError,
    differs_key,
    find_end,
    part_key,
    record_key,
)
from shoal.rendezvous.key import HOW_TO_SET_KEY, random_key
from shoal.rendezvous.record import Endpoint, Record, decode
from shoal.rendezvous.roll import Part, Roll, decode_part
from shoal.rendezvous.roll import decode as decode_roll

if TYPE_CHECKING:
    from shoal.rendezvous.store.asking import Asking

_FIRST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.02  # delays a join by at most this; starting a rank takes far longer
# Ranks of a large group poll torch's store, which cannot be waited in, all at once: 256 ranks at
# 0.1 s make 2560 requests a second, a tenth of the rate at which shoal's store answers on one core.
_LONGEST_WAIT_PER_RANK_S: Final = 0.0004


class Meeting:
    """One rank's view of the store in one attempt, with the key that it was given. No other I/O."""

    def __init__(
        self, store: Asking, attempt: Attempt, rank: int, own: Record, given_key: bytes | None
    ) -> None:
        self.rank = rank
        self.own = own
        self.roll: Roll | None = None
        self.oddities: dict[int, str] = {}  # by rank, why its record is of no use
        self.look_at = 0.0  # when to look for the roll again
        self.attempt = attempt.number
        self.before = attempt.before  # why the attempt before this one ended
        self._store = store
        self._given_key = given_key
        self._wait_s = _FIRST_WAIT_S

    @property
    def size(self) -> int:
        return self.own.size

    @property
    def store_host(self) -> str | None:
        """The store's host, see `Store.host`."""
        return self._store.host

    @property
    def job_key(self) -> bytes:
        """The key that all ranks hold; needs a roll."""
        return self._given_key or (self.roll and self.roll.key) or b""

    def publish(self, own: Record) -> None:
        """Write this rank's record."""
        self.own = own
        self._store.set(record_key(self.attempt, self.rank), own.encode())

    def look(self, until: float) -> None:
        """Look for the roll and set `look_at`, the time of the next look.

        Waits for missing values in the store until `until`, if the store can wait: that costs less
        than repeated requests. UsageError if a rank runs another version, or only one of that rank
        and this one was given a job key.
        """
        self.roll = self._find(until)
        self.look_at = time.monotonic() + self._wait_s
        longest_s = max(_LONGEST_WAIT_S, self.size * _LONGEST_WAIT_PER_RANK_S)
        self._wait_s = min(2 * self._wait_s, longest_s)

    def _find(self, until: float) -> Roll | None:
        raise NotImplementedError

    def look_around(self) -> None:
        """Check that this attempt goes on and still has this rank's record. Called while stuck.

        Raises AttemptOverError if all meet again, ShoalError if a rank cannot join, UsageError if
        another process published as this rank.
        """
        self.check_end()
        value = self._store.try_get(record_key(self.attempt, self.rank)) or b""
        found = decode(value)
        if found is not None and found.nonce != self.own.nonce:
            raise PlaceTakenError(self.rank, value)
        gone = self.before
        if gone is None or not gone.is_failure:
            return
        if self._store.try_get(record_key(self.attempt, gone.rank)):
            self.before = None  # that rank is back

    def check_end(self) -> None:
        """Raise the failed rank's error or AttemptOverError if this attempt has ended."""
        end = find_end(self._store, self.attempt)
        if end is not None and end.is_failure:
            raise end.error()
        if end is not None:
            raise AttemptOverError

    def endpoint(self, rank: int) -> Endpoint | None:
        """Return where a rank listens for other hosts, once published. Reads the store."""
        record = self._read(rank)
        return None if record is None else record.endpoint

    def label(self, rank: int) -> str:
        """Return a rank's host name from the roll, NOT from the store, which may not answer."""
        return "" if self.roll is None else self.roll.labels[self.roll.hosts[rank]]

    def unpublished(self, *, asks: bool) -> list[int] | None:
        """Return the ranks whose record is not in the store, or is of no use; None: unknown.

        Args:
            asks: True to read the store once more, with a request or two for each of them.
        """
        if asks:
            with contextlib.suppress(ShoalError):  # the store is gone, or late
                return [rank for rank in self._missing() if self._read(rank) is None]
        return self._known_missing()

    def _known_missing(self) -> list[int] | None:
        """Return the same without a request. A rank that waits for rank 0 has read no record."""
        return None

    def _missing(self) -> list[int]:
        """Return the ranks whose record this rank needs and has not seen."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def _await(self, key: str, until: float) -> bytes | None:
        """Return the value, if it is set by `until`."""
        wait_s = until - time.monotonic()
        if wait_s <= 0 or not self._store.can_wait:
            return self._store.try_get(key)
        try:
            return self._store.get(key, wait_s)
        except TimedOut:
            if time.monotonic() >= self._store.deadline:
                raise  # the store itself may not have answered
            return None

    def _read(self, rank: int) -> Record | None:
        value = self._store.try_get(record_key(self.attempt, rank))
        return None if value is None else self._judge(rank, value)

    def _judge(self, rank: int, value: bytes) -> Record | None:
        """Return a usable record; or None, with the reason in `oddities`."""
        record = decode(value)
        if record is None:
            self.oddities[rank] = (
                "its record is damaged, or of another version of shoal: is the same shoal "
                "installed on all hosts?"
            )
            return None
        if record.version != HANDSHAKE_VERSION:
            raise UsageError(
                f"rank {rank} speaks version {record.version} of shoal's rendezvous, rank "
                f"{self.rank} version {HANDSHAKE_VERSION}: install the same shoal on all hosts"
            )
        if record.size != self.size:
            # Not an error yet: a leftover of an earlier, larger group looks the same.
            self.oddities[rank] = (
                f"it published for a group of {record.size}, rank {self.rank} is in one of "
                f"{self.size}: WORLD_SIZE differs?"
            )
            self._size_differs(rank, record)
            return None
        if record.has_own_key is not (self._given_key is not None):
            without, with_key = (rank, self.rank) if self._given_key else (self.rank, rank)
            raise UsageError(
                f"rank {with_key} was given a job key, rank {without} was not. {HOW_TO_SET_KEY}"
            )
        self.oddities.pop(rank, None)
        return record

    def _size_differs(self, rank: int, record: Record) -> None:
        """Handle a record of another size, which may be a leftover."""
        raise NotImplementedError


class RootMeeting(Meeting):
    """Rank 0's view: it reads all records and writes the roll."""

    def __init__(
        self, store: Asking, attempt: Attempt, own: Record, given_key: bytes | None
    ) -> None:
        super().__init__(store, attempt, 0, own, given_key)
        self._records = {0: own}

    def _find(self, until: float) -> Roll | None:
        if self._missing():
            self._read_missing(until)
        if self._missing():
            return None
        key = random_key() if self._given_key is None else None
        roll = Roll.of([self._records[rank] for rank in range(self.size)], key)
        parts = roll.encode() if self.size > 1 else []
        for part in reversed(range(len(parts))):  # the first part last: readers wait for it
            self._store.set(part_key(self.attempt, part), parts[part])
        return roll

    def _read_missing(self, until: float) -> None:
        missing = self._missing()
        values = self._store.try_get_all([record_key(self.attempt, rank) for rank in missing])
        if values is not None:
            for rank, value in zip(missing, values, strict=True):
                self._note(rank, value)
            return
        for rank in missing:  # one after another, since all are needed
            found = self._await(record_key(self.attempt, rank), until)
            if found is None:
                break
            self._note(rank, found)

    def _size_differs(self, rank: int, record: Record) -> None:
        """Confirm to that rank that rank 0 of this run has read its record."""
        self._store.set(differs_key(self.attempt, rank), record.nonce)

    def _note(self, rank: int, value: bytes) -> None:
        record = self._judge(rank, value)
        if record is not None:
            self._records[rank] = record

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._records]

    def _known_missing(self) -> list[int]:
        return self._missing()


class MemberMeeting(Meeting):
    """Any other rank's view: it waits for the roll."""

    def look_around(self) -> None:
        """As `Meeting.look_around`; also check that rank 0's record is usable."""
        super().look_around()
        if self.roll is None:
            self._read(0)

    def _size_differs(self, rank: int, record: Record) -> None:
        """Raise UsageError if rank 0 has read our record, so its own record is not a leftover."""
        seen = self._store.try_get(differs_key(self.attempt, self.rank))
        if seen == self.own.nonce:
            raise UsageError(
                f"WORLD_SIZE differs: rank {rank} on {record.host_label} is in a group of "
                f"{record.size}, rank {self.rank} in one of {self.size}; set the same on every rank"
            )

    def _find(self, until: float) -> Roll | None:
        first = self._await(part_key(self.attempt, 0), until)
        if first is None:
            return None
        roll = self._decode(first)
        if roll is None:
            self.oddities[0] = f"the roll that it wrote is damaged, or without rank {self.rank}"
        return roll

    def _decode(self, first: bytes) -> Roll | None:
        """Return the roll with this first part, if this rank's nonce is in it."""
        part = decode_part(first, self.size)
        if part is None:
            return None
        parts = [part, *self._other_parts(part.n_parts)]
        roll = decode_roll(parts, self.size) if len(parts) == part.n_parts else None
        return roll if roll is not None and roll.nonces[self.rank] == self.own.nonce else None

    def _other_parts(self, n_parts: int) -> Sequence[Part]:
        if n_parts == 1:
            return []
        values = self._store.try_get_all([part_key(self.attempt, k) for k in range(1, n_parts)])
        parts = [decode_part(value, self.size) for value in values or ()]
        return [part for part in parts if part is not None]
