"""The result of a rendezvous: the peers of a group, and their addresses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.engine import RankInfo
from shoal.errors import Closed

if TYPE_CHECKING:
    from shoal.rendezvous.roll import Roll
    from shoal.rendezvous.roster import Entry


class Peer(NamedTuple):
    """Another rank, as `Mesh.create` takes it.

    Args:
        is_local: True if the peer is on this host, and has entered the memory that its ranks share.
        n_paths: the number of connections to it, which the lower rank sets; 0 inside a host.
        listens_at: of a rank of another host: address and port, by path, that can be dialled for
            the life of the job.
    """

    rank: int
    is_local: bool
    n_paths: int
    listens_at: tuple[tuple[str, int], ...]


class Membership:
    """One epoch of a group, as one rank sees it.

    Owns `listener_fds` until `take()` hands them over; `close()` closes them if they were not
    taken. All are close-on-exec.

    Attributes:
        epoch: 64 random bits, the same on all ranks; every link proves them.
        names: by rank, its host, and where it listens for others; no address on this host.
        peers: all other ranks, ascending.
        digests: by rank, the settings digest that it passed to `join`.
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
        self.epoch, self.rank, self.size = roll.epoch, rank, len(roster)
        self.listens_at = _places(roster[rank])
        names, peers = [], []
        for other, nonce in enumerate(roll.nonces):
            entry, is_local = roster[other], roll.hosts[other] == roll.hosts[rank]
            address = "" if is_local else str(entry.listens_at[0])
            names.append(RankInfo(entry.host_label, address, entry.host_id, nonce.hex()))
            if other != rank:
                places = () if is_local else _places(entry)
                n_paths = len(places if other < rank or is_local else self.listens_at)
                peers.append(Peer(other, is_local, n_paths, places))
        self.names, self.peers = tuple(names), tuple(peers)
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


def _places(entry: Entry) -> tuple[tuple[str, int], ...]:
    return tuple((one.address, one.port) for one in entry.listens_at)
