"""What staging needs of a GPU: streams, events, and host memory to copy to and from.

A stream does one after another what it is given, and an event is a point in it. Nothing here waits:
the host goes on at once.
"""

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

_cuda: Any = torch.cuda  # parts of which have no types

Stream = Any
Event = Any
TensorsFuture = torch.futures.Future[list[torch.Tensor]]

# As many streams as torch's pool has for each priority.
_N_PAIRS: Final = 16


class Device:
    """A GPU, by way of torch.cuda. Threads: any."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def check(self, doing: str) -> None:
        """Raise Unsupported in a CUDA graph: it would replay copies without the call between them.

        Args:
            doing: what for, as the message begins.
        """
        if torch.cuda.is_current_stream_capturing():
            raise unsupported(f"{doing} inside a CUDA graph", "call it outside of the graph")

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """Pinned bytes. Once dropped, they are not used anew before all copies of them are done.

        From torch's allocator, which keeps pinned memory and knows the copies of it.
        """
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def side_stream(self) -> Stream:
        """A stream beside others, ordered behind all that the current one has been given.

        One of torch's pool of 32, which hands them out in turn; before kernels, as in Gloo.
        """
        stream = _cuda.Stream(self.place, priority=-1)
        stream.wait_event(self.record())
        return stream

    def side_pair(self) -> tuple[Stream, Stream]:
        """Two streams, each as `side_stream`, which are made once and handed out in turn."""
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
        """Meanwhile that is the current stream of this thread, and this the current device."""
        return torch.cuda.stream(stream)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Give the current stream a copy to do, without blocking.

        Both tensors may be dropped after `keep`, or are host's: pinned.
        """
        to.copy_(source, non_blocking=True)

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        """Give the current stream the division of a tensor, in place and in its own type."""
        tensor.div_(divisor)

    def record(self, stream: Stream | None = None) -> Event:
        """The point behind all that a stream has been given; None: the current one."""
        return (stream or torch.cuda.current_stream(self.place)).record_event()

    def has_passed(self, event: Event) -> bool:
        """Whether all that was before it is done. Raises RuntimeError if the device has failed."""
        return bool(event.query())

    def order_current(self, behind: Event) -> None:
        """Have the calling thread's current stream go on only behind an event."""
        torch.cuda.current_stream(self.place).wait_event(behind)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Should the tensor be dropped, use its memory only behind what the stream has by then."""
        tensor.record_stream(stream)

    def future(self, devices: Sequence[Device]) -> TensorsFuture:
        """A future of tensors of these, which orders the streams of those who wait behind it."""
        return torch.futures.Future(devices=[device.place for device in devices])

    def identity(self) -> str:
        """What tells it from all others of its host; "" where it has no collectives of its own.

        NOT the index: CUDA_VISIBLE_DEVICES gives each process its own.
        """
        if not dist.is_nccl_available():
            return ""
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def collectives(self, store: Store, rank: int, size: int, timeout_s: float) -> NcclCollectives:
        """NCCL's, of the GPUs of this host; returns when they work. Every one of them calls it.

        Args:
            store: of these ranks alone.
            timeout_s: that a call may take.
        """
        from shoal.frontend.torch.gpu import nccl

        return nccl.NcclCollectives(self, store, rank, size, timeout_s)


@functools.lru_cache(maxsize=64)
def device_at(place: torch.device) -> Device | None:
    """The device whose tensors are there; None if shoal serves none there."""
    return Device(place) if place.type == "cuda" else None
