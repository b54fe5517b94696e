"""Point to point: the two halves of one transfer, which two ranks call for themselves."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Recv, Send, Step


def send(rank: int, size: int, peer: int) -> Iterator[Step]:
    """Send the whole buffer to `peer`, which calls `recv`.

    Cost:   1 round; the whole buffer.
    Needs:  1 chunk.
    Leaves: the own buffer as it was.
    Source: the definition.
    """
    yield Send(peer, chunk=0)


def recv(rank: int, size: int, peer: int) -> Iterator[Step]:
    """Receive the whole buffer from `peer`, which calls `send`.

    Cost:   1 round; sends nothing.
    Needs:  1 chunk.
    Leaves: the buffer of `peer`.
    Source: the definition.
    """
    yield Recv(peer, chunk=0)
