"""Calls on device memory as calls on host memory: cut into pieces, which are copied one by one.

While one piece is on the wire the next is on its way from the device, and the one before on its
way back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from shoal.dtypes import item_size
from shoal.group.buffers import BufferView

if TYPE_CHECKING:
    from shoal.frontend.torch.collectives import Access
    from shoal.frontend.torch.gpu.device import Device, Event, Stream
    from shoal.frontend.torch.layouts import Arguments
    from shoal.group.work import Work

# The bytes of all blocks of a piece. Smaller ones cost more calls for the same bytes, larger ones
# leave more of the first copy out and the last copy back in the open. Not yet measured on a GPU: at
# 25 GB/s a copy of this size takes 0.2 ms, as does the all-reduce of two ranks of one host.
PIECE_BYTES: Final = 4 << 20

# Pieces begin at whole lines, also in the host memory that they share.
_LINE_BYTES: Final = 64


def cut(call: Arguments, alike: int | None, size: int) -> list[Arguments]:
    """One call as several on ranges of the elements, the same ranges on every rank.

    Args:
        call: its buffers: one that is worked on in place, or what is written and what is read.
        alike: which of them is one block, as long on every rank unless those of the other one are
            uneven; None if none is. Then, and where they are uneven, the call is not cut.
        size: how many blocks the other one has.
    """
    if alike is None or uneven_lengths(call):
        return [call]
    block: BufferView = call[alike]
    n_elems, item = block.n_elems, item_size(block.dtype)
    n_pieces = -(-n_elems * item * (size if len(call) > 1 else 1) // PIECE_BYTES)
    if n_pieces <= 1:
        return [call]
    line = _LINE_BYTES // item
    step = -(-n_elems // (n_pieces * line)) * line
    ranges = [(begin, min(begin + step, n_elems)) for begin in range(0, n_elems, step)]
    return [tuple(_part(each, n_elems, begin, end) for each in call) for begin, end in ranges]


def uneven_lengths(call: Arguments) -> list[int]:
    """The lengths of a call's blocks of all ranks, the same on each; empty if they are equal."""
    for each in call:
        if isinstance(each, list):
            lengths = [view.n_elems for view in each]
            return lengths if len(set(lengths)) > 1 else []
    return []


def _part(blocks: Any, n_elems: int, begin: int, end: int) -> Any:
    """The range of each block, which has `n_elems`; one view may hold several blocks."""
    if blocks is None:
        return None
    if isinstance(blocks, list):
        return [range_of(each, begin, end) for each in blocks]
    if blocks.n_elems == n_elems:
        return range_of(blocks, begin, end)
    starts = range(0, blocks.n_elems, n_elems)
    return [range_of(blocks, start + begin, start + end) for start in starts]


def range_of(view: BufferView, begin: int, end: int) -> BufferView:
    """A range of the elements of a view."""
    address = view.address + begin * item_size(view.dtype)
    return BufferView(address, end - begin, view.dtype, view.owner)


class Piece:
    """A call, or a part of one, with host memory in the place of the device's.

    Args:
        call: its buffers, in device memory; `accesses` says what is done to each.

    Attributes:
        arguments: the buffers, in host memory.
        copied: behind the copies of what is read.
        work: the group's call; None before it is posted.
        has_ended: whether that has ended and been looked at.
    """

    def __init__(self, device: Device, call: Arguments, accesses: Sequence[Access]) -> None:
        views = [view for each in call for view in _views(each)]
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
            _mapped(each, functools.partial(in_host, access=access))
            for each, access in zip(call, accesses, strict=True)
        )

    def copy_out(self, device: Device, stream: Stream) -> None:
        """Give the stream, which is the current one, the copies of what is read."""
        for here, there in self._out:
            device.copy(here, there)
        self.copied = device.record(stream)

    def copy_back(self, device: Device) -> None:
        """Give the current stream the copies of what was written; the call has ended well."""
        for there, here in self._back:
            device.copy(there, here)

    def let_go(self) -> None:
        """Keep no memory any longer. The copies that were given to streams need none of this."""
        self._out.clear()
        self._back.clear()
        self.arguments = ()


def owners(calls: Sequence[Arguments]) -> list[torch.Tensor]:
    """The tensors in whose memory the buffers of the calls lie, each once."""
    found = {id(view.owner): view.owner for call in calls for each in call for view in _views(each)}
    return list(found.values())  # type: ignore[arg-type]  # all are tensors here


def bytes_of(view: BufferView) -> torch.Tensor:
    """The memory of a view as the bytes of the contiguous tensor that it lies in."""
    owner: Any = view.owner
    begin = view.address - owner.data_ptr()
    flat: torch.Tensor = owner.detach().reshape(-1).view(torch.uint8)
    return flat[begin : begin + view.n_bytes]


def _views(buffer: Any) -> list[BufferView]:
    if buffer is None:
        return []
    return buffer if isinstance(buffer, list) else [buffer]


def _mapped(buffer: Any, change: Callable[[BufferView], BufferView]) -> Any:
    if buffer is None:
        return None
    return [change(view) for view in buffer] if isinstance(buffer, list) else change(buffer)
