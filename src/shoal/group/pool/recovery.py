"""What mends a call whose servers are lost, from what each worker holds of it. Pure.

A result lands by whole segments, so each segment of a worker's buffer is either its input or the
result, and every worker knows which. What one worker holds it gives to the others; what nobody
holds is reduced again, since then every worker still has its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

NOBODY: Final = -1


class Repair(NamedTuple):
    """What is done about segments `begin` to `end` - 1 of one chunk.

    Args:
        holder: the lowest worker that holds the result there, which broadcasts it; `NOBODY`: the
            workers reduce it again.
    """

    chunk: int
    begin: int
    end: int
    holder: int


def replan(landed: Sequence[Sequence[bytes]], n_segments: Sequence[int]) -> list[Repair]:
    """How to complete a call; nothing is said of segments that every worker holds.

    The same on every worker, if they are told the same.

    Args:
        landed: by worker, of each chunk: bit s % 8 of byte s // 8 says that segment s holds the
            result. Bits beyond the chunk's end mean nothing.
        n_segments: of each chunk.
    """
    repairs: list[Repair] = []
    for chunk, n in enumerate(n_segments):
        held = [int.from_bytes(bitmaps[chunk], "little") for bitmaps in landed]
        repairs += _repairs_of(chunk, held, n)
    return repairs


def _repairs_of(chunk: int, held: Sequence[int], n_segments: int) -> Iterator[Repair]:
    everywhere = (1 << n_segments) - 1
    for bits in held:
        everywhere &= bits
    begin, before = 0, None  # of a run of segments that have the same holder; None: all hold them
    for segment in range(n_segments + 1):
        holder = None
        if segment < n_segments and not everywhere >> segment & 1:
            holder = next((rank for rank, bits in enumerate(held) if bits >> segment & 1), NOBODY)
        if holder != before:
            if before is not None:
                yield Repair(chunk, begin, segment, before)
            begin, before = segment, holder
