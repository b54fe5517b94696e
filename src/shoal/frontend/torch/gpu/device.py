"""A GPU's streams and events, and pinned host memory. No call here blocks the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.frontend.torch.tensor_buffers import unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.gpu.nccl import NcclCollectives

_cuda: Any = torch.cuda  # parts of it have no types

Stream = Any
Event = Any
TensorsFuture = torch.futures.Future[list[torch.Tensor]]

_N_PAIRS: Final = 16  # all streams of one priority in torch's pool


class Device:
    """A GPU, used through torch.cuda. Threads: any."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def check(self, doing: str) -> None:
        """Raise Unsupported in a CUDA graph, which would replay the copies but not the call."""
        if torch.cuda.is_current_stream_capturing():
            raise unsupported(f"{doing} inside a CUDA graph", "call it outside of the graph")

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """Return pinned bytes from torch's allocator, which reuses them only after their copies."""
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def side_stream(self) -> Stream:
        """Return a stream from torch's pool of 32, ordered behind the current stream's work.

        It has a higher priority than kernels, as in Gloo.
        """
        stream = _cuda.Stream(self.place, priority=-1)
        stream.wait_event(self.record())
        return stream

    def side_pair(self) -> tuple[Stream, Stream]:
        """Return two streams like `side_stream`; 16 pairs are created once and used in turn."""
        pair = next(self._pairs)
        event = self.record()
        for stream in pair:
            stream.wait_event(event)
        return pair

    @functools.cached_property
    def _pairs(self) -> itertools.cycle[tuple[Stream, Stream]]:
        streams = [_cuda.Stream(self.place, priority=-1) for _ in range(2 * _N_PAIRS)]
        return itertools.cycle(list(zip(streams[::2], streams[1::2], strict=True)))

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make a stream this thread's current stream within the context."""
        return torch.cuda.stream(stream)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream; device memory needs `keep`, host memory is pinned."""
        to.copy_(source, non_blocking=True)

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        """Queue the division of a tensor on the current stream, in place and in its own dtype."""
        tensor.div_(divisor)

    def record(self, stream: Stream | None = None) -> Event:
        """Return an event behind all work queued on a stream; None: the current stream."""
        return (stream or torch.cuda.current_stream(self.place)).record_event()

    def has_passed(self, event: Event) -> bool:
        """Return True if all work before an event is done; RuntimeError if the device failed."""
        return bool(event.query())

    def order_current(self, behind: Event) -> None:
        """Order the calling thread's current stream behind an event."""
        torch.cuda.current_stream(self.place).wait_event(behind)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let torch reuse a dropped tensor's memory only after the work queued on the stream."""
        tensor.record_stream(stream)

    def future(self, devices: Sequence[Device]) -> TensorsFuture:
        """Return a future of tensors on these devices that orders its waiters' streams."""
        return torch.futures.Future(devices=[device.place for device in devices])

    def identity(self) -> str:
        """Return the GPU's UUID (CUDA_VISIBLE_DEVICES changes its index); "" without NCCL."""
        if not dist.is_nccl_available():
            return ""
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def collectives(self, store: Store, rank: int, size: int, timeout_s: float) -> NcclCollectives:
        """Return NCCL's collectives of this host's GPUs after a trial; every rank calls it.

        Args:
            store: used only by these ranks.
            timeout_s: limit of each call.
        """
        from shoal.frontend.torch.gpu import nccl

        return nccl.NcclCollectives(self, store, rank, size, timeout_s)


@functools.lru_cache(maxsize=64)
def device_at(place: torch.device) -> Device | None:
    """Return the device at a place; None if shoal serves no tensors there."""
    return Device(place) if place.type == "cuda" else None
