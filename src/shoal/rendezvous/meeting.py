"""What the store shows of one meeting: the records of all ranks, and the roll made of them.

Rank 0 reads all records and writes the roll; the others wait for a roll with their own nonce in it.
A store may outlive a group, so a record can be a leftover of an earlier one, and rank 0 may call it
up: it reads the records again until the group stands, and any that has changed makes another roll.
No leftover gets into a group. Two ranks prove a link to each other only under the same epoch, the
epoch is that of all nonces, and each rank is on a roll only if its own nonce, which it has just
drawn, is there; so once a rank has links by way of others to all, each of them is on the same roll,
and there by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.rendezvous.farewell import FAREWELL_KEY, Farewell, decode_farewell
from shoal.rendezvous.handshake import VERSION
from shoal.rendezvous.key import HOW_TO_SET_KEY, random_key
from shoal.rendezvous.record import Endpoint, Record, decode, record_key
from shoal.rendezvous.roll import Part, Roll, decode_part, part_key
from shoal.rendezvous.roll import decode as decode_roll

if TYPE_CHECKING:
    from shoal.rendezvous.store.asking import Asking

_FIRST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.02  # adds this much to a join at most; a rank's start takes far longer
# Many ranks that find a leftover ask the store for the roll all at once: 256 ranks at 0.1 s are
# 2560 questions a second, a tenth of what our own store answers on one core.
_LONGEST_WAIT_PER_RANK_S: Final = 0.0004


class Meeting:
    """One rank's view of the store. Does no other I/O.

    Its look may wait in the store for what is not there, if it can: a question to the store costs
    more than to be woken by it.
    """

    def __init__(self, store: Asking, own: Record, rank: int, given_key: bytes | None) -> None:
        self.rank = rank
        self.own = own
        self.roll: Roll | None = None  # with our own nonce in it
        self.oddities: dict[int, str] = {}  # why a record that is there is of no use
        self.look_at = 0.0  # when to look again; once there is a roll, only if something is doubted
        self.farewell: Farewell | None = None  # of a rank that left and has not come again
        self._store = store
        self._given_key = given_key
        self._wait_s = _FIRST_WAIT_S

    @property
    def size(self) -> int:
        """Of the group."""
        return self.own.size

    @property
    def store_host(self) -> str | None:
        """Where the store is, see `Store.host`."""
        return self._store.host

    @property
    def job_key(self) -> bytes:
        """The key all ranks hold. Needs a roll."""
        return self._given_key or (self.roll and self.roll.key) or b""

    def publish(self, own: Record) -> None:
        """Write our record over whatever is there."""
        self.own = own
        self._store.set(record_key(self.rank), own.encode())

    def doubt(self, look_at: float = 0.0) -> None:
        """Something spoke against the roll: look again, from then on."""
        self.look_at = min(self.look_at, look_at)

    def look(self, until: float) -> None:
        """Look at what is missing or doubted, and set `roll` and `look_at`.

        Args:
            until: how long it may wait for a value that is not there.

        Raises:
            UsageError: a rank runs another version, or has a job key where we have none.
        """
        before = self.roll
        is_sure = self._find(until)
        now = time.monotonic()
        if self.roll != before:
            self._wait_s = _FIRST_WAIT_S
        self.look_at = float("inf") if is_sure else now + self._wait_s
        longest_s = max(_LONGEST_WAIT_S, self.size * _LONGEST_WAIT_PER_RANK_S)
        self._wait_s = min(2 * self._wait_s, longest_s)

    def _find(self, until: float) -> bool:
        """Look for a roll; False: soon again, and without waiting."""
        raise NotImplementedError

    def look_around(self) -> None:
        """While nothing moves: look who has left, whether somebody has taken our place.

        Raises:
            ShoalError: a rank has left since we published.
            UsageError: another process published as this rank.
        """
        value = self._store.try_get(record_key(self.rank))
        found = None if value is None else decode(value)
        if found is None:
            self.publish(self.own)  # it was damaged on its way
        elif found.nonce != self.own.nonce:
            raise UsageError(
                f"another process joined as rank {self.rank}, on {found.host_label}: every process "
                "needs a RANK of its own"
            )
        self._receive_farewell()

    def _receive_farewell(self) -> None:
        value = self._store.try_get(FAREWELL_KEY)
        found = None if value is None else decode_farewell(value)
        if found is not None and not self._stands(found):
            found = None
        self.farewell = found
        if found is not None and self.has_lost_one:
            raise found.error()

    def _stands(self, farewell: Farewell) -> bool:
        """Whether it is of a rank of this group that has not been started again."""
        if farewell.size != self.size or farewell.rank == self.rank:
            return False
        value = self._store.try_get(record_key(farewell.rank))
        record = None if value is None else decode(value)
        return farewell.nonce == (b"" if record is None else record.nonce)

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank that knew us has left the meeting."""
        return self.farewell is not None and self.farewell.knew(self.rank, self.own.nonce)

    def endpoint(self, rank: int) -> Endpoint | None:
        """Where a rank of the roll listens for other hosts, once it says so. Asks the store."""
        record = self._read(rank)
        if record is None or self.roll is None or record.nonce != self.roll.nonces[rank]:
            return None  # NOT an endpoint of its predecessor
        return record.endpoint

    def label(self, rank: int) -> str:
        """The host name of a rank of the roll, for people. NOT from the store: it may be mute."""
        return "" if self.roll is None else self.roll.labels[self.roll.hosts[rank]]

    def unpublished(self, *, asks: bool) -> list[int]:
        """The ranks whose record is not in the store, or is of no use.

        Args:
            asks: whether to ask the store once more, a request or two for each of them.
        """
        if asks:
            with contextlib.suppress(ShoalError):  # the store is gone
                return [rank for rank in self._missing() if self._read(rank) is None]
        return self._known_missing()

    def _known_missing(self) -> list[int]:
        """The same without asking. NOT all others: who has not looked for them knows nothing."""
        return []

    def _missing(self) -> list[int]:
        """Of whom no record has been seen, as far as we look for them."""
        if self.roll is not None:
            return []
        return [rank for rank in range(self.size) if rank != self.rank]

    def _await(self, key: str, until: float) -> bytes | None:
        """The value, if there is one by then."""
        wait_s = until - time.monotonic()
        if wait_s <= 0 or not self._store.can_wait:
            return self._store.try_get(key)
        try:
            return self._store.get(key, wait_s)
        except TimedOut:
            if time.monotonic() >= self._store.deadline:
                raise  # it may have been the store that did not answer
            return None

    def _read(self, rank: int) -> Record | None:
        value = self._store.try_get(record_key(rank))
        return None if value is None else self._judge(rank, value)

    def _judge(self, rank: int, value: bytes) -> Record | None:
        """A record of use, or None with the reason noted."""
        record = decode(value)
        if record is None:
            self.oddities[rank] = (
                "what it published is no record of this version of shoal, or was damaged: is the "
                "same shoal installed on all hosts?"
            )
            return None
        if record.version != VERSION:
            raise UsageError(
                f"rank {rank} speaks version {record.version} of shoal's rendezvous, rank "
                f"{self.rank} version {VERSION}: install the same shoal on all hosts"
            )
        if record.size != self.size:
            # Not an error yet: a leftover of an earlier, larger group looks the same.
            self.oddities[rank] = (
                f"it published for a group of {record.size}, rank {self.rank} is in one of "
                f"{self.size}: WORLD_SIZE differs?"
            )
            return None
        if record.has_own_key is not (self._given_key is not None):
            without, with_key = (rank, self.rank) if self._given_key else (self.rank, rank)
            raise UsageError(
                f"rank {with_key} was given a job key, rank {without} was not. {HOW_TO_SET_KEY}"
            )
        self.oddities.pop(rank, None)
        return record


class RootMeeting(Meeting):
    """Rank 0's view: it reads the records of all, and writes the roll."""

    def __init__(self, store: Asking, own: Record, given_key: bytes | None) -> None:
        super().__init__(store, own, 0, given_key)
        self._records = {0: own}
        self._key = random_key() if given_key is None else None
        self._parts: list[bytes] = []  # of the roll, as they must lie in the store

    def look_around(self) -> None:
        """The same; and whether the roll lies there as we wrote it."""
        super().look_around()
        if any(self._store.try_get(part_key(k)) != part for k, part in enumerate(self._parts)):
            self._write_roll()

    def _find(self, until: float) -> bool:
        if self.size > 1:
            self._read_all(until)
        if len(self._records) == self.size:
            self._call()
        return not self._missing()

    def _read_all(self, until: float) -> None:
        missing = self._missing() or range(1, self.size)
        values = self._store.try_get_all([record_key(rank) for rank in missing])
        if values is not None:
            for rank, value in zip(missing, values, strict=True):
                self._note(rank, self._judge(rank, value))
        elif self.roll is None:
            for rank in missing:  # one after the other: all are needed
                found = self._await(record_key(rank), until)
                if found is None:
                    break
                self._note(rank, self._judge(rank, found))

    def _note(self, rank: int, record: Record | None) -> None:
        if record is not None:
            self._records[rank] = record

    def _call(self) -> None:
        """Write the roll, if it has changed."""
        roll = Roll.of([self._records[rank] for rank in range(self.size)], self._key)
        if roll != self.roll:
            self._parts = roll.encode() if self.size > 1 else []
            self._write_roll()
            self.roll = roll

    def _write_roll(self) -> None:
        for k in reversed(range(len(self._parts))):  # the first part last: it tells of the others
            self._store.set(part_key(k), self._parts[k])

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._records]

    def _known_missing(self) -> list[int]:
        return self._missing()


class MemberMeeting(Meeting):
    """Any other rank's view: it waits for the roll."""

    _sees_leftover = False  # the store shows a roll that is not ours: it does not wait for another

    def look_around(self) -> None:
        """The same; and whether rank 0 is one that we can meet."""
        super().look_around()
        if self.roll is None:
            self._read(0)

    def _find(self, until: float) -> bool:
        first = self._await(part_key(0), 0.0 if self._sees_leftover else until)
        found = None if first is None else self._decode(first)
        self._sees_leftover = first is not None and found is None
        if found is not None:
            self.roll = found
        return self.roll is not None

    def _decode(self, first: bytes) -> Roll | None:
        """The roll whose first part this is, if our nonce is in it."""
        part = decode_part(first, self.size)
        if part is None:
            return None
        if self.roll is not None and part.epoch == self.roll.epoch:
            return self.roll
        parts = [part, *self._other_parts(part.n_parts)]
        roll = decode_roll(parts, self.size) if len(parts) == part.n_parts else None
        return roll if roll is not None and roll.nonces[self.rank] == self.own.nonce else None

    def _other_parts(self, n_parts: int) -> Sequence[Part]:
        if n_parts == 1:
            return []
        values = self._store.try_get_all([part_key(part) for part in range(1, n_parts)])
        parts = [decode_part(value, self.size) for value in values or ()]
        return [part for part in parts if part is not None]
