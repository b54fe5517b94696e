"""Runs calls on device memory in host memory, cut into pieces that are copied one by one.

While one piece is on the wire, the next is copied out and the previous one is copied back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from shoal.frontend.torch.layouts import each_block, views_in
from shoal.group.buffers import BufferView

if TYPE_CHECKING:
    from shoal.frontend.torch.collectives import Access
    from shoal.frontend.torch.gpu.device import Device, Event, Stream
    from shoal.frontend.torch.layouts import Arguments
    from shoal.group.work import Work

# The size of all blocks of a piece. Smaller pieces cost more calls; larger ones expose more of the
# first copy out and the last copy back. Not yet measured on a GPU: at 25 GB/s a copy of this size
# takes 0.2 ms, as long as the all-reduce of two ranks of one host.
PIECE_BYTES: Final = 4 << 20

# Pieces begin at whole cache lines, also in host memory, and at whole blocks of 32 of a codec.
_LINE_BYTES: Final = 128


def cut(call: Arguments, alike: int | None, size: int) -> list[Arguments]:
    """Cut a call into several on ranges of the elements, the same ranges on every rank.

    Args:
        call: its buffers: one in place, or the written and the read one.
        alike: the index of the buffer that is one block, with the same length on every rank, or
            None. The call is not cut if it is None, or the other buffer's blocks are uneven.
        size: the number of blocks of the other buffer.
    """
    if alike is None or uneven_lengths(call):
        return [call]
    block: BufferView = call[alike]
    n_elems, item = block.n_elems, block.dtype.n_bytes
    n_pieces = -(-n_elems * item * (size if len(call) > 1 else 1) // PIECE_BYTES)
    if n_pieces <= 1:
        return [call]
    line = _LINE_BYTES // item
    step = -(-n_elems // (n_pieces * line)) * line
    ranges = [(begin, min(begin + step, n_elems)) for begin in range(0, n_elems, step)]
    return [tuple(_part(each, n_elems, begin, end) for each in call) for begin, end in ranges]


def uneven_lengths(call: Arguments) -> list[int]:
    """Return the lengths of a call's uneven blocks, the same on all ranks; empty if even."""
    for each in call:
        if isinstance(each, list):
            lengths = [view.n_elems for view in each]
            return lengths if len(set(lengths)) > 1 else []
    return []


def _part(blocks: Any, n_elems: int, begin: int, end: int) -> Any:
    """Return a range of each block of `n_elems`; one view may hold several blocks."""
    if blocks is None:
        return None
    if isinstance(blocks, list):
        return [range_of(each, begin, end) for each in blocks]
    if blocks.n_elems == n_elems:
        return range_of(blocks, begin, end)
    starts = range(0, blocks.n_elems, n_elems)
    return [range_of(blocks, start + begin, start + end) for start in starts]


def range_of(view: BufferView, begin: int, end: int) -> BufferView:
    """Return a range of the elements of a view."""
    address = view.address + begin * view.dtype.n_bytes
    return BufferView(address, end - begin, view.dtype, view.owner)


class Piece:
    """A call, or a part of one, with host memory in place of the device's; `accesses` by buffer.

    Attributes:
        arguments: the buffers in host memory.
        copied: the event behind the copies out.
        work: the group's call; None before it is posted.
        has_ended: True when the call has ended and `StagedCall` has noticed.
    """

    def __init__(self, device: Device, call: Arguments, accesses: Sequence[Access]) -> None:
        views = [view for each in call for view in views_in(each)]
        lengths = [-(-view.n_bytes // _LINE_BYTES) * _LINE_BYTES for view in views]
        memory = device.host_memory(sum(lengths))
        offsets = iter(itertools.accumulate(lengths, initial=0))
        self.copied: Event = None
        self.work: Work | None = None
        self.has_ended = False
        self._out: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

        def in_host(view: BufferView, access: Access) -> BufferView:
            at = next(offsets)
            here, there = memory[at : at + view.n_bytes], bytes_of(view)
            is_read, is_written = access
            if is_read and view.n_elems:
                self._out.append((here, there))
            if is_written and view.n_elems:
                self._back.append((there, here))
            return BufferView(memory.data_ptr() + at, view.n_elems, view.dtype, memory)

        self.arguments: Arguments = tuple(
            each_block(each, functools.partial(in_host, access=access))
            for each, access in zip(call, accesses, strict=True)
        )

    def copy_out(self, device: Device, stream: Stream) -> None:
        """Queue the copies out on the stream, which must be the current stream."""
        for here, there in self._out:
            device.copy(here, there)
        self.copied = device.record(stream)

    def copy_back(self, device: Device) -> None:
        """Queue the copies back on the current stream, after a call without an error."""
        for there, here in self._back:
            device.copy(there, here)

    def let_go(self) -> None:
        """Release the memory; queued copies do not need it."""
        self._out.clear()
        self._back.clear()
        self.arguments = ()


def owners(calls: Sequence[Arguments]) -> list[torch.Tensor]:
    """Return the tensors that own the memory of the calls' buffers, each once."""
    found = {
        id(view.owner): view.owner for call in calls for each in call for view in views_in(each)
    }
    return list(found.values())  # type: ignore[arg-type]  # all are tensors here


def bytes_of(view: BufferView) -> torch.Tensor:
    """Return the bytes of a view, as a part of its contiguous tensor."""
    owner: Any = view.owner
    begin = view.address - owner.data_ptr()
    flat: torch.Tensor = owner.detach().reshape(-1).view(torch.uint8)
    return flat[begin : begin + view.n_bytes]
