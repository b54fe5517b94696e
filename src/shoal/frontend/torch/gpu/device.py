"""What staging needs of an accelerator: streams, events, and host memory to copy to and from.

The words are CUDA's. A stream does one after another what it is given, and an event is a point in
it. Nothing here waits: the host goes on at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shoal.frontend.torch.unsupported import unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.gpu.local_calls import LocalCollectives

_cuda: Any = torch.cuda  # parts of which have no types

Stream = Any  # each kind of device has its own
Event = Any
TensorsFuture = torch.futures.Future[list[torch.Tensor]]


class Device(Protocol):
    """One device, as staging sees it. Threads: any."""

    @property
    def place(self) -> torch.device:
        """As tensors name it."""

    def check(self, doing: str) -> None:
        """Raise Unsupported where the current stream cannot wait for the host.

        Args:
            doing: what for, as the message begins.
        """

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """Pinned bytes. Once dropped, they are not used anew before all copies of them are done."""

    def side_stream(self) -> Stream:
        """A stream beside others, ordered behind all that the current one has been given."""

    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Give a stream a copy to do. Both tensors may be dropped after `keep`, or are host's."""

    def copy_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of another device, behind what the current streams have been given."""

    def record(self, stream: Stream) -> Event:
        """The point behind all that a stream has been given."""

    def has_passed(self, event: Event) -> bool:
        """Whether all that was before it is done."""

    def order_current(self, behind: Event) -> None:
        """Have the current stream go on only behind an event."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Meanwhile that is the current stream of this thread."""

    def divide(self, stream: Stream, tensor: torch.Tensor, divisor: int) -> None:
        """Give a stream the division of a tensor, in place."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Should the tensor be dropped, use its memory only behind what the stream has by then."""

    def future(self, devices: Sequence[Device]) -> TensorsFuture:
        """A future of tensors of these, which orders the streams of those who ask behind it."""

    def identity(self) -> str:
        """What tells it from all others of its host; "" where it has no collectives of its own."""

    def collectives(self, store: Store, rank: int, size: int, timeout_s: float) -> LocalCollectives:
        """Those of the devices of this host; returns when they work. Every one of them calls it.

        Args:
            store: of these ranks alone.
            timeout_s: that a call may take.
        """


class CudaDevice:
    """A GPU, by way of torch.cuda."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def check(self, doing: str) -> None:
        """A graph would replay the copies without the call between them."""
        if torch.cuda.is_current_stream_capturing():
            raise unsupported(f"{doing} inside a CUDA graph", "call it outside of the graph")

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """From torch's allocator, which keeps pinned memory and knows the copies of it."""
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def side_stream(self) -> torch.cuda.Stream:
        """One of torch's pool of 32, which hands them out in turn; before kernels, as in Gloo."""
        stream: torch.cuda.Stream = _cuda.Stream(self.place, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.place))
        return stream

    def copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Without blocking: one side is pinned, or both are here."""
        with self.on(stream):
            to.copy_(source, non_blocking=True)

    def copy_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the current stream of the other; torch orders that of this one behind it."""
        return tensor.to(self.place, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event without a time."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def has_passed(self, event: torch.cuda.Event) -> bool:
        """Raises RuntimeError if the device has failed."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def order_current(self, behind: torch.cuda.Event) -> None:
        """The current stream is that of the calling thread on this device."""
        torch.cuda.current_stream(self.place).wait_event(behind)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """It is the current device too."""
        return torch.cuda.stream(stream)

    def divide(self, stream: torch.cuda.Stream, tensor: torch.Tensor, divisor: int) -> None:
        """In the tensor's own type."""
        with self.on(stream):
            tensor.div_(divisor)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """By torch's caching allocator."""
        tensor.record_stream(stream)

    def future(self, devices: Sequence[Device]) -> TensorsFuture:
        """It notes the current streams when it completes; who waits is ordered behind them."""
        return torch.futures.Future(devices=[device.place for device in devices])

    def identity(self) -> str:
        """NOT the index: CUDA_VISIBLE_DEVICES gives each process its own."""
        if not dist.is_nccl_available():
            return ""
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def collectives(self, store: Store, rank: int, size: int, timeout_s: float) -> LocalCollectives:
        """NCCL's."""
        from shoal.frontend.torch.gpu.nccl import NcclCollectives

        return NcclCollectives(self, store, rank, size, timeout_s)


@functools.lru_cache(maxsize=64)
def device_at(place: torch.device) -> Device | None:
    """The device whose tensors are there; None if shoal serves none there."""
    return CudaDevice(place) if place.type == "cuda" else None
