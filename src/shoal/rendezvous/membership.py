"""What a finished rendezvous leaves: who the peers are, and a proven socket to each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from shoal.errors import Closed


class PeerInfo(NamedTuple):
    """One peer and the descriptors that lead to it.

    Args:
        host_label: the peer's host name, for people.
        host_id: equal for all ranks of one host, different between hosts.
        address: `10.0.0.2:4711` or `[fd00::2]:4711`, the far end of the connection; inside a host
            `unix`.
        is_local: whether the peer is on this host: it has entered the memory that its ranks share.
        socket_fds: a rank of another host: by path, connected, proven, non-blocking, without delay.
            Nothing of what the peer sent after the handshake has been read.
        listens_at: a rank of another host: address and port, by path, where it can be dialled
            again if it is a lower one; where a higher one can be asked to dial us.
    """

    rank: int
    host_label: str
    host_id: str
    address: str
    is_local: bool
    socket_fds: tuple[int, ...] = ()
    listens_at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Membership:
    """One epoch of a group, as one rank sees it.

    Owns all `socket_fds` of its peers, and `listener_fds`, until `take()` hands them over;
    `close()` closes them if nobody took them. All are close-on-exec.

    Args:
        epoch: 64 random bits, the same on all ranks.
        host_id: of this rank's host.
        peers: all other ranks, ascending.
        cards: by rank, what it gave `join` as its card.
        listener_fds: where ranks of other hosts can reach this one for the life of the job.
        process_ids: by rank, 128 random bits; the epoch, which every link proves, is made of them.
        job_key: what all ranks of the job hold; derive from it (key.py), do not send it.
    """

    epoch: int
    rank: int
    size: int
    host_id: str
    peers: tuple[PeerInfo, ...]
    cards: tuple[bytes, ...]
    job_key: bytes = field(repr=False)
    process_ids: tuple[bytes, ...]
    listener_fds: tuple[int, ...] = ()
    _held: list[int] = field(init=False, repr=False, compare=False)
    _is_taken: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        held = [fd for peer in self.peers for fd in peer.socket_fds]
        object.__setattr__(self, "_held", [*held, *self.listener_fds])

    def take(self) -> tuple[PeerInfo, ...]:
        """Hand over all descriptors: the caller closes them from here on.

        Raises:
            Closed: they were taken or closed before.
        """
        if self._is_taken:
            raise Closed("the descriptors of this membership were taken or closed before")
        object.__setattr__(self, "_is_taken", True)
        self._held.clear()
        return self.peers

    def close(self) -> None:
        """Close what was not taken; idempotent."""
        object.__setattr__(self, "_is_taken", True)
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
