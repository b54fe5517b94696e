"""The result of a rendezvous: the peers of a group, and their addresses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import Closed

if TYPE_CHECKING:
    from shoal.rendezvous.roll import Roll
    from shoal.rendezvous.roster import Entry


class PeerInfo(NamedTuple):
    """One peer.

    Args:
        host_label: the peer's host name, for people.
        host_id: equal for all ranks of one host, different between hosts.
        address: `10.0.0.2:4711` or `[fd00::2]:4711`, where it listens for other hosts; inside a
            host `unix`.
        is_local: True if the peer is on this host, and has entered the memory that its ranks share.
        listens_at: of a rank of another host: address and port, by path, that can be dialled for
            the life of the job.
    """

    rank: int
    host_label: str
    host_id: str
    address: str
    is_local: bool
    listens_at: tuple[tuple[str, int], ...] = ()


class Membership:
    """One epoch of a group, as one rank sees it.

    Owns `listener_fds` until `take()` hands them over; `close()` closes them if they were not
    taken. All are close-on-exec.

    Attributes:
        epoch: 64 random bits, the same on all ranks.
        host_id: of this rank's host.
        peers: all other ranks, ascending.
        digests: by rank, the settings digest that it passed to `join`.
        process_ids: by rank, 128 random bits; the epoch, which every link proves, is their hash.
        job_key: the secret of all ranks of the job; derive keys from it (key.py), do NOT send it.
        listens_at: the addresses of this rank that ranks of other hosts know; empty in a group on
            one host.
        listener_fds: the sockets that listen there.
    """

    def __init__(
        self,
        roll: Roll,
        roster: Mapping[int, Entry],
        rank: int,
        job_key: bytes,
        listener_fds: tuple[int, ...],
    ) -> None:
        own, self.rank, self.size = roster[rank], rank, len(roster)
        self.epoch, self.process_ids = roll.epoch, roll.nonces
        self.host_id, self.listens_at = own.host_id, _places(own)
        self.peers = tuple(
            _peer(other, roster[other], roll.hosts[other] == roll.hosts[rank])
            for other in range(self.size)
            if other != rank
        )
        self.digests = tuple(roster[other].digest for other in range(self.size))
        self.job_key = job_key
        self.listener_fds = listener_fds
        self._is_taken = False

    def take(self) -> tuple[int, ...]:
        """Hand over `listener_fds`, for the caller to close; Closed if they are gone already."""
        if self._is_taken:
            raise Closed("the descriptors of this membership were taken or closed before")
        self._is_taken = True
        return self.listener_fds

    def close(self) -> None:
        """Close the descriptors that were not taken; idempotent."""
        for fd in () if self._is_taken else self.take():
            os.close(fd)

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _peer(rank: int, entry: Entry, is_local: bool) -> PeerInfo:
    address = "unix" if is_local else str(entry.listens_at[0])
    listens_at = () if is_local else _places(entry)
    return PeerInfo(rank, entry.host_label, entry.host_id, address, is_local, listens_at)


def _places(entry: Entry) -> tuple[tuple[str, int], ...]:
    return tuple((one.address, one.port) for one in entry.listens_at)
