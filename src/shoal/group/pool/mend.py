"""Completes a call whose servers are lost, on all workers together.

Results are written by whole segments, so each segment of a worker's buffer is either its input or
the result, and every worker knows which. If a worker holds a segment's result, it sends it to the
others. If no worker does, the segment is reduced again, since every worker still has its input.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import DType
from shoal.engine import round_to
from shoal.group.buffers import BufferView
from shoal.group.work import FOR_EVER_S
from shoal.schedule.stripes import first_of, n_stripes_of, stride_of
from shoal.shapes import layouts_of, unit_of

if TYPE_CHECKING:
    from shoal.group.pool.control import Control
    from shoal.group.pool.served_call import ServedCall
    from shoal.group.work import Work
    from shoal.shapes import Shape

_N_AT_ONCE: Final = 32  # broadcasts on their way
NOBODY: Final = -1


class Repair(NamedTuple):
    """The way to complete segments `begin` to `end` - 1 of one chunk.

    Args:
        holder: the lowest worker that holds the result there, which broadcasts it; `NOBODY`: the
            workers reduce it again.
    """

    chunk: int
    begin: int
    end: int
    holder: int


def replan(landed: Sequence[Sequence[bytes]], n_segments: Sequence[int]) -> list[Repair]:
    """Return how to complete the segments that a worker is missing; a pure function.

    Args:
        landed: by worker and chunk, a bitmap: bit s % 8 of byte s // 8 is set if segment s holds
            the result. Bits beyond the chunk's end are ignored.
        n_segments: the number of segments of each chunk.
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
    begin, before = 0, None  # of a run of segments with one holder; None: all hold them
    for segment in range(n_segments + 1):
        holder = None
        if segment < n_segments and not everywhere >> segment & 1:
            holder = next((rank for rank, bits in enumerate(held) if bits >> segment & 1), NOBODY)
        if holder != before:
            if before is not None:
                yield Repair(chunk, begin, segment, before)
            begin, before = segment, holder


class _Piece(NamedTuple):
    """A range of a call's buffer in bytes, and the worker that broadcasts the result there."""

    offset: int
    n_bytes: int
    giver: int


def mend(control: Control, call: ServedCall) -> None:
    """Complete the servers' part of a call on all workers, with the same bits as from servers.

    Raises ShoalError, with memory partly folded, if the workers' group has ended.
    """
    offsets, lengths = layouts_of(call.shape)[0]
    segment, n_segments = call.shape.segment_bytes, _n_segments(call.shape)
    bitmaps = control.bytes_of_all(_own(call, n_segments), _left_s(call), call.subject)
    cuts = list(itertools.accumulate(((n + 7) // 8 for n in n_segments), initial=0))
    landed = [[held[a:b] for a, b in itertools.pairwise(cuts)] for held in bitmaps]
    unheld, held_by_one = [], []
    for repair in replan(landed, n_segments):
        begin = offsets[repair.chunk]
        end = begin + min(repair.end * segment, lengths[repair.chunk])
        begin += repair.begin * segment
        if repair.holder == NOBODY:
            unheld.append(_Piece(begin, end - begin, _first_at(begin, call.shape, control.size)))
        else:
            held_by_one.append(_Piece(begin, end - begin, repair.holder))
    works: list[Work] = []
    try:
        _round(call, unheld)
        _reduce(control, call, unheld, works)
        own = [piece for piece in unheld if piece.giver == control.rank]
        _round(call, own, call.subject if call.shape.codec.sums_at_random else 0)
        _give(control, call, [*held_by_one, *unheld], works)
    finally:
        for work in works:  # NOT left in flight: they write to memory that the caller gets back
            work.drive(FOR_EVER_S)


def is_whole_here(call: ServedCall) -> bool:
    """Return True if this worker holds the complete result of a failed servers' part."""
    if call.servers is None or not call.servers.done():
        return False
    n_segments = _n_segments(call.shape)
    return int.from_bytes(_own(call, n_segments), "little").bit_count() == sum(n_segments)


def _n_segments(shape: Shape) -> list[int]:
    return [-(-length // shape.segment_bytes) for length in layouts_of(shape)[0][1]]


def _own(call: ServedCall, n_segments: list[int]) -> bytes:
    """Return the bitmaps of the segments that landed here, chunk by chunk."""
    held = dict(call.servers.landed()) if call.servers is not None else {}
    bitmaps = (
        held.get(chunk, b"").ljust((n + 7) // 8, b"\0") for chunk, n in enumerate(n_segments)
    )
    return b"".join(bitmaps)


def _first_at(offset: int, shape: Shape, n_workers: int) -> int:
    """Return the worker at which the fold order of this offset's stripe begins."""
    item = shape.dtype.n_bytes
    n_bytes = shape.n_elems * item
    n_stripes = n_stripes_of(n_bytes, n_workers)
    stride = stride_of(n_bytes, n_stripes, unit_of(shape.codec.block, item))
    return first_of(offset // stride, n_workers, n_stripes)


def _round(call: ServedCall, pieces: list[_Piece], seed: int = 0) -> None:
    """Round pieces to the call's codec as workers do before a send; with a seed, as servers do."""
    dtype, codec = call.shape.dtype, call.shape.codec
    item = dtype.n_bytes
    if not codec.is_narrow:
        return
    for piece in pieces:
        place = call.address + piece.offset, piece.n_bytes // item
        round_to(codec, dtype, *place, seed=seed, first=piece.offset // item)


def _reduce(control: Control, call: ServedCall, pieces: list[_Piece], works: list[Work]) -> None:
    """Fold each piece at its giver, where its order begins; one piece per worker at a time."""
    by_giver: defaultdict[int, deque[_Piece]] = defaultdict(deque)
    for piece in pieces:
        by_giver[piece.giver].append(piece)
    item = call.shape.dtype.n_bytes
    while any(by_giver.values()):
        blocks = []
        for rank in range(control.size):
            own = by_giver[rank]
            piece = own.popleft() if own else _Piece(0, 0, rank)
            address = call.address + piece.offset
            blocks.append(BufferView(address, piece.n_bytes // item, call.shape.dtype, None))
        dtype, op = call.shape.dtype, call.shape.op
        works.append(control.fold_at(blocks, dtype, op, _left_s(call)))
    _wait(works)


def _give(control: Control, call: ServedCall, pieces: list[_Piece], works: list[Work]) -> None:
    for piece in pieces:
        data = BufferView(call.address + piece.offset, piece.n_bytes, DType.UINT8, None)
        works.append(control.start_broadcast(data, piece.giver, _left_s(call)))
        if len(works) == _N_AT_ONCE:
            _wait(works)
    _wait(works)


def _wait(works: list[Work]) -> None:
    while works:
        works[-1].wait()
        works.pop()


def _left_s(call: ServedCall) -> float:
    return max(0.001, call.until - time.monotonic())
