"""The records of all ranks, as far as the store shows them, and the epoch that follows from them.

A store may outlive a group, so a record can be a leftover of an earlier one: it is used until
something speaks against it (a refused connection, a peer in another epoch), then read again. Two
ranks prove a link to each other only under the same epoch, and the epoch holds the nonces of all
ranks, each rank's own among them; so once every link stands, every record was the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shoal.errors import ShoalError, UsageError
from shoal.rendezvous.farewell import FAREWELL_KEY, Farewell, decode_farewell
from shoal.rendezvous.handshake import VERSION
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.record import Endpoint, Record, decode, epoch_of, record_key

if TYPE_CHECKING:
    from shoal.rendezvous.store import Store

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.02  # adds this much to a join at most; a rank's start takes far longer
# Many ranks that wait for one ask the store for it all at once: 256 ranks at 0.1 s are 2560
# questions a second, a tenth of what our own store answers on one core.
_LONGEST_WAIT_PER_RANK_S = 0.0004


class Roster:
    """Who is in the group, read from the store. Does no I/O but the store's."""

    def __init__(self, store: Store, rank: int, own: Record, given_key: bytes | None) -> None:
        self.rank = rank
        self.own = own
        self.epoch: int | None = None  # known once every rank has a record
        self.n_channels = 1  # of this epoch; each has connections of its own
        self.oddities: dict[int, str] = {}  # why a record that is there is of no use
        self.read_at = 0.0
        self.farewell: Farewell | None = None  # of a rank that left and has not come again
        self._store = store
        self._given_key = given_key
        self._records = {rank: own}
        self._doubted = set(range(own.size)) - {rank}
        self._wait_s = _FIRST_WAIT_S / 2  # the first refresh doubles it
        self._longest_wait_s = max(_LONGEST_WAIT_S, own.size * _LONGEST_WAIT_PER_RANK_S)

    def publish(self, own: Record) -> None:
        """Write our record over whatever is there."""
        self.own = self._records[self.rank] = own
        self._store.set(record_key(self.rank), own.encode())

    def doubt(self, ranks: Iterable[int], read_at: float = 0.0) -> None:
        """Something spoke against these records: read them again, from `read_at` on."""
        self._doubted.update(ranks)
        self._doubted.discard(self.rank)
        self.read_at = min(self.read_at, read_at)

    def refresh(self, now: float) -> None:
        """Read what is missing or doubted, and set `epoch` and `read_at`.

        Raises:
            UsageError: a rank runs another version, or has a job key where we have none.
        """
        news = False
        for rank, record in self._read_doubted():
            if record != self._records.get(rank):
                self._records[rank] = record
                news = True
            if record.endpoint is not None or self.is_local(rank) or rank > self.rank:
                self._doubted.discard(rank)
        self._wait_s = _FIRST_WAIT_S if news else min(2 * self._wait_s, self._longest_wait_s)
        self.read_at = now + self._wait_s if self._doubted else float("inf")
        if news and len(self._records) == self.own.size:
            self.epoch = epoch_of([self._records[rank].nonce for rank in range(self.own.size)])

    def _read_doubted(self) -> Iterator[tuple[int, Record]]:
        """All records at once; while some are missing, now and then those up to the first of them.

        Without it there is no epoch, so there is no hurry about the others: only about what is
        wrong with them.
        """
        ranks = sorted(self._doubted)
        values = self._store.try_get_all([record_key(rank) for rank in ranks])
        if values is None and self._wait_s < self._longest_wait_s:
            return
        for at, rank in enumerate(ranks):
            record = self._read(rank) if values is None else self._judge(rank, values[at])
            if record is None:
                return
            yield rank, record

    def cards(self) -> tuple[bytes, ...]:
        """By rank, what each one gave for all to read. Needs all records."""
        return tuple(self._records[rank].card for rank in range(self.own.size))

    def process_ids(self) -> tuple[bytes, ...]:
        """By rank, the 128 random bits that its process drew for this epoch. Needs all records."""
        return tuple(self._records[rank].nonce for rank in range(self.own.size))

    def record(self, rank: int) -> Record | None:
        """What is known of a rank."""
        return self._records.get(rank)

    def is_local(self, rank: int) -> bool:
        """Whether a rank with a record is on our host."""
        return self._records[rank].host_id == self.own.host_id

    def host_id(self, rank: int) -> str:
        """The host of a rank with a record."""
        return self._records[rank].host_id

    def label(self, rank: int) -> str:
        """The host name of a rank, for people."""
        record = self._records.get(rank)
        return record.host_label if record is not None else "an unknown host"

    def target(self, rank: int, connection: int = 0) -> Endpoint | str | None:
        """Where to connect to: a Unix name, an endpoint, or None if that is not known yet."""
        record = self._records.get(rank)
        if self.epoch is None or record is None:
            return None
        if self.is_local(rank):
            return record.unix_name
        path = connection % record.n_paths
        return record.more[path - 1] if path > 0 else record.endpoint

    def n_connections(self, rank: int) -> int:
        """How many we have with a rank that has a record: all paths of a channel, then the next's.

        The lower rank decides how many paths there are.
        """
        if self.is_local(rank):
            return 1
        n_paths = (self._records[rank] if rank < self.rank else self.own).n_paths
        return n_paths * self.n_channels

    def remote_ranks(self) -> list[int]:
        """The ranks on other hosts, as far as they have a record."""
        return [rank for rank in sorted(self._records) if not self.is_local(rank)]

    @property
    def job_key(self) -> bytes:
        """The key all ranks hold. Needs `epoch` to be known."""
        return self._given_key or self._records[0].key or b""

    def unpublished(self, *, asks: bool) -> list[int]:
        """The ranks whose record is not in the store, or is of no use.

        Args:
            asks: whether to ask the store once more, a request or two for each of them.
        """
        missing = [rank for rank in range(self.own.size) if rank not in self._records]
        try:
            return [rank for rank in missing if not asks or self._read(rank) is None]
        except ShoalError:  # the store is gone
            return missing

    def hear_farewell(self) -> None:
        """Look whether a rank has left the meeting; `farewell` is what it left behind.

        Raises:
            ShoalError: one has, since we published.
        """
        value = self._store.try_get(FAREWELL_KEY)
        found = None if value is None else decode_farewell(value)
        if found is not None and not self._stands(found):
            found = None
        self.farewell = found
        if found is not None and self.has_lost_one:
            raise found.error()

    def _stands(self, farewell: Farewell) -> bool:
        """Whether it is of a rank of this group that has not been started again."""
        if farewell.size != self.own.size or farewell.rank == self.rank:
            return False
        value = self._store.try_get(record_key(farewell.rank))
        record = None if value is None else decode(value)
        return farewell.nonce == (b"" if record is None else record.nonce)

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank that knew us has left the meeting."""
        return self.farewell is not None and self.farewell.knew(self.rank, self.own.nonce)

    def check_own(self) -> None:
        """Make sure that our record is there, and that no other process published as this rank.

        Raises:
            UsageError: one has.
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

    def _read(self, rank: int) -> Record | None:
        value = self._store.try_get(record_key(rank))
        return None if value is None else self._judge(rank, value)

    def _judge(self, rank: int, value: bytes) -> Record | None:
        """A record of use, or None with the reason noted."""
        record = decode(value)
        if record is None:
            self.oddities[rank] = "what it published is no record of shoal's, or was damaged"
            return None
        if record.version != VERSION:
            raise UsageError(
                f"rank {rank} speaks version {record.version} of shoal's rendezvous, rank "
                f"{self.rank} version {VERSION}: install the same shoal on all hosts"
            )
        if record.size != self.own.size:
            # Not an error yet: a leftover of an earlier, larger group looks the same.
            self.oddities[rank] = (
                f"it published for a group of {record.size}, rank {self.rank} is in one of "
                f"{self.own.size}: WORLD_SIZE differs?"
            )
            return None
        if record.has_own_key is not (self._given_key is not None):
            without, with_key = (rank, self.rank) if self._given_key else (self.rank, rank)
            raise UsageError(
                f"rank {with_key} was given a job key, rank {without} was not. {HOW_TO_SET_KEY}"
            )
        if rank == 0 and not record.has_own_key and record.key is None:
            self.oddities[rank] = "what it published holds no key for the job"
            return None
        self.oddities.pop(rank, None)
        return record
