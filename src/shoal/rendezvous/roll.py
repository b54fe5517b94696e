"""The roll: all processes that meet in one epoch. Rank 0 writes it, and all others read it.

It is in the store in one or more parts; the first part is written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.engine import HANDSHAKE_VERSION, N_NONCE_BYTES
from shoal.rendezvous.key import N_KEY_BYTES
from shoal.rendezvous.packing import Unpacker, number, seal, text_field, unpack
from shoal.rendezvous.record import MAX_SIZE
from shoal.rendezvous.store import MAX_VALUE_BYTES

if TYPE_CHECKING:
    from shoal.rendezvous.record import Record

_KIND: Final = b"shoal/ro"
_PART_BYTES: Final = MAX_VALUE_BYTES - 64  # leaves room for the part's head and seal
_N_RANK_BYTES: Final = N_NONCE_BYTES + 4
_N_HOST_BYTES: Final = 512


class Roll(NamedTuple):
    """The processes that meet in one epoch.

    Args:
        nonces: by rank, 128 random bits that its process chose.
        hosts: by rank, the number of its host, in the order of their lowest ranks.
        leader_names: by host, the Unix name at which its lowest rank listens.
        labels: by host, its name for people.
        key: a random job key if the job was given no key, else None. It is sent with the nonces, so
            that the key of an earlier group cannot be combined with this epoch.
    """

    nonces: tuple[bytes, ...]
    hosts: tuple[int, ...]
    leader_names: tuple[str, ...]
    labels: tuple[str, ...]
    key: bytes | None = None

    @property
    def epoch(self) -> int:
        """64 random bits: a hash of all nonces, so that no rank can choose them."""
        return int.from_bytes(hashlib.sha256(b"".join(self.nonces)).digest()[:8], "big")

    @classmethod
    def of(cls, records: Sequence[Record], key: bytes | None) -> Roll:
        """Return the roll of the ranks with these records."""
        lowest: dict[str, Record] = {}  # by host
        for record in records:
            lowest.setdefault(record.host_id, record)
        numbers = {host_id: number for number, host_id in enumerate(lowest)}
        nonces = tuple(record.nonce for record in records)
        hosts = tuple(numbers[record.host_id] for record in records)
        leader_names = tuple(record.unix_name for record in lowest.values())
        labels = tuple(record.host_label for record in lowest.values())
        return cls(nonces, hosts, leader_names, labels, key)

    def encode(self) -> list[bytes]:
        """Return the parts, each a value for the store."""
        body = number(len(self.nonces), 4) + number(len(self.leader_names), 4)
        body += bytes((self.key is not None,)) + (self.key or b"") + b"".join(self.nonces)
        body += b"".join(number(host, 4) for host in self.hosts)
        body += b"".join(map(text_field, self.leader_names + self.labels))
        pieces = [body[at : at + _PART_BYTES] for at in range(0, len(body), _PART_BYTES)]
        head = number(self.epoch, 8) + number(len(pieces), 4)
        return [
            seal(_KIND, HANDSHAKE_VERSION, head + number(part, 4) + piece)
            for part, piece in enumerate(pieces)
        ]


class Part(NamedTuple):
    """One part of a roll."""

    epoch: int
    n_parts: int
    part: int
    piece: bytes


def decode_part(value: bytes, size: int) -> Part | None:
    """Return the part in this value, of a roll of `size` ranks; None for other values."""
    most = 1 + size * (_N_RANK_BYTES + _N_HOST_BYTES) // _PART_BYTES
    try:
        data = unpack(_KIND, value)
        epoch, n_parts = data.number(8, 0, 2**64 - 1), data.number(4, 1, most)
        return Part(epoch, n_parts, data.number(4, 0, n_parts - 1), data.rest())
    except ValueError:
        return None


def decode(parts: Sequence[Part], size: int) -> Roll | None:
    """Return the roll of `size` ranks; None if these are not all its parts, in order."""
    first = parts[0]
    wanted = [(first.epoch, len(parts), part) for part in range(first.n_parts)]
    if [each[:3] for each in parts] != wanted:
        return None
    try:
        roll = _unpack(Unpacker(b"".join(each.piece for each in parts)), size)
    except ValueError:
        return None
    return roll if roll.epoch == first.epoch else None


def _unpack(data: Unpacker, size: int) -> Roll:
    n_ranks, n_hosts = data.number(4, size, size), data.number(4, 1, min(size, MAX_SIZE))
    key = data.take(N_KEY_BYTES) if data.number(1, 0, 1) else None
    nonces = data.take(n_ranks * N_NONCE_BYTES)
    n = N_NONCE_BYTES
    hosts = tuple(data.number(4, 0, n_hosts - 1) for _ in range(n_ranks))
    leader_names = tuple(data.text() for _ in range(n_hosts))
    labels = tuple(data.text() for _ in range(n_hosts))
    data.end()
    if list(dict.fromkeys(hosts)) != list(range(n_hosts)):
        raise ValueError("the hosts are out of order")
    by_rank = tuple(nonces[n * rank : n * (rank + 1)] for rank in range(n_ranks))
    return Roll(by_rank, hosts, leader_names, labels, key)
