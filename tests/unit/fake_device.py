"""A device whose copies, and a wire whose calls, are done when the test steps them.

Tensors "on" it lie in this process's memory, under a class that claims to be on a GPU. Events pass
by themselves. The wire fails if a call's data is not there yet or is touched while it is in flight.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from process.staged import ThreadDevice
from unit.fakes import FakeWork

from shoal.dtypes import DType
from shoal.errors import ShoalError
from shoal.group.buffers import BufferView
from shoal.group.calls import Calls

Range = tuple[int, int]


class OnDevice(torch.Tensor):
    """A tensor that claims to be on cuda:0."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)


class OnOtherDevice(OnDevice):
    """A tensor that claims to be on cuda:1."""

    device = torch.device("cuda", 1)


def on_device(tensor: torch.Tensor, kind: type[OnDevice] = OnDevice) -> torch.Tensor:
    return tensor.as_subclass(kind)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def extent(tensor: torch.Tensor) -> Range:
    """Return the first and last address of a tensor's elements."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + ((last + 1) * tensor.element_size() if tensor.numel() else 0)


def overlap(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class FakeEvent:
    passed = False


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Work | FakeEvent | Waiting] = deque()


class Waiting(NamedTuple):
    """Makes a stream wait for an event."""

    event: FakeEvent


class Work(NamedTuple):
    """A kernel or a copy in a stream's queue."""

    go: Callable[[], object]
    touched: list[Range]


class _Block(bytearray):
    """Host memory that shows if it is still referenced."""


class FakeDevice(ThreadDevice):
    """A device whose streams the test steps, without the threads of its base."""

    def __init__(self) -> None:
        self.place = torch.device("cuda", 0)
        self.lock = threading.RLock()
        self.current = FakeStream("current")
        self.streams = [self.current]
        self.blocks: list[weakref.ref[_Block]] = []
        self.wire: FakeWire | None = None
        self.fails = False
        self.n_copies = 0
        self.used: set[tuple[int, str]] = set()  # storages of the device, with their streams
        self.kept: set[tuple[int, str]] = set()
        self.futures_of: list[list[Any]] = []
        self._on_thread = threading.local()

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        block = _Block(b"\xee" * max(n_bytes, 1))
        self.blocks.append(weakref.ref(block))
        return torch.frombuffer(block, dtype=torch.uint8)[:n_bytes]

    def side_stream(self) -> FakeStream:
        stream = FakeStream(f"side {len(self.streams)}")
        with self.lock:
            self.streams.append(stream)
            stream.queue.append(Waiting(self.record(self._current())))
        return stream

    def _current(self) -> FakeStream:
        return getattr(self._on_thread, "stream", self.current)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._current()
        if self.fails:
            raise RuntimeError("the device has failed")
        if self.wire is not None:
            self.wire.check_untouched([extent(to), extent(source)])
        for tensor in (to, source):
            if isinstance(tensor, OnDevice):
                self.used.add((tensor.untyped_storage().data_ptr(), stream.name))
        self.n_copies += 1
        there, here = plain(to), plain(source)
        mode = torch.is_inference_mode_enabled()

        def go() -> None:
            with torch.inference_mode(mode):  # the mode of the submitting thread
                there.copy_(here)

        stream.queue.append(Work(go, [extent(source), extent(to)]))

    def record(self, stream: FakeStream | None = None) -> FakeEvent:
        event = FakeEvent()
        with self.lock:
            (stream or self._current()).queue.append(event)
            self.settle()
        return event

    def has_passed(self, event: FakeEvent) -> bool:
        if self.fails:
            raise RuntimeError("the device has failed")
        self.settle()
        return event.passed

    def order_current(self, behind: FakeEvent) -> None:
        self._current().queue.append(Waiting(behind))

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.kept.add((tensor.untyped_storage().data_ptr(), stream.name))

    def future(self, devices: Sequence[Any]) -> torch.futures.Future[Any]:
        self.futures_of.append(list(devices))
        return torch.futures.Future()

    def kernel(self, go: Callable[[], object]) -> None:
        """Put a kernel on the current stream."""
        self.current.queue.append(Work(go, []))

    def settle(self) -> None:
        """Let events pass that are first in their queues."""
        with self.lock:
            while sum(self._advance(stream) for stream in self.streams):
                pass

    def _advance(self, stream: FakeStream) -> bool:
        moved = False
        while stream.queue and not isinstance(stream.queue[0], Work):
            head = stream.queue[0]
            if isinstance(head, FakeEvent):
                head.passed = True
            elif not head.event.passed:
                break
            stream.queue.popleft()
            moved = True
        return moved

    def ready(self) -> list[FakeStream]:
        """Return the streams that can run a kernel or copy next."""
        self.settle()
        return [s for s in self.streams if s.queue and isinstance(s.queue[0], Work)]

    def step(self, stream: FakeStream) -> None:
        with self.lock:  # the posting thread must not see it removed before it is done
            work = stream.queue.popleft()
            assert isinstance(work, Work)
            if self.wire is not None:
                self.wire.check_untouched(work.touched)
            work.go()
            self.settle()

    def run_dry(self) -> None:
        while streams := self.ready():
            self.step(streams[0])

    def pending(self) -> list[Work]:
        with self.lock:
            return [each for s in self.streams for each in s.queue if isinstance(each, Work)]

    def n_blocks_held(self) -> int:
        return sum(block() is not None for block in self.blocks)


class WireCall(FakeWork):
    """A call of the fake wire, which the test ends in two steps: `finish` and `call_back`."""

    source: int | None = 0

    def __init__(self, name: str, reads: list[BufferView], writes: list[BufferView]) -> None:
        super().__init__()
        self.name, self.reads, self.writes = name, reads, writes
        self.read_at_first = [content(view) for view in reads]
        self.effect: Callable[[], None] = lambda: None

    def ranges(self) -> list[Range]:
        return [view.extent for view in (*self.reads, *self.writes)]

    def finish(self, failure: ShoalError | None = None) -> None:
        assert [content(view) for view in self.reads] == self.read_at_first
        self.is_done, self.failure = True, failure
        if failure is None:
            self.effect()
        # As a Work does: release the owners.
        self.reads, self.writes, self.effect = [], [], lambda: None

    def call_back(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.is_done, "a test of one thread must not wait for a call that it must end"
        if self.failure is not None:
            raise self.failure


def content(view: BufferView) -> bytes:
    return ctypes.string_at(view.address, view.n_bytes) if view.n_elems else b""


def numbers(view: BufferView) -> torch.Tensor:
    """Return a tensor over the view's memory."""
    kind = torch.uint8 if view.dtype is DType.BOOL else getattr(torch, str(view.dtype))
    if not view.n_elems:
        return torch.empty(0, dtype=kind)
    memory = (ctypes.c_char * view.n_bytes).from_address(view.address)
    return torch.frombuffer(memory, dtype=kind)


class FakeWire:
    """A group, rank 1 of 2; rank 0 contributes this rank's values plus 3."""

    name, rank, size = "fake", 1, 2
    check_fold, _check_apart = Calls.check_fold, Calls._check_apart

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = device
        if device is not None:
            device.wire = self
        self.calls: list[WireCall] = []
        self.aborted: list[str] = []
        self.lost: ShoalError | None = None
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def abort(self, why: str) -> None:
        self.aborted.append(why)

    def ended(self) -> ShoalError | None:
        return self.lost

    def under_way(self) -> list[WireCall]:
        return [call for call in self.calls if not call.is_done]

    def check_untouched(self, ranges: Sequence[Range]) -> None:
        """Fail if a copy touches memory that a call uses."""
        for call in self.under_way():
            for one in call.ranges():
                assert not any(overlap(one, other) for other in ranges), f"during {call.name}"

    def lose(self, error: ShoalError) -> None:
        """End the group: all calls fail, and so do later ones."""
        self.lost = error
        for call in self.under_way():
            call.finish(error)

    def _post(
        self, name: str, reads: list[BufferView], writes: list[BufferView], effect: Any, how: Any
    ) -> WireCall | None:
        if self.lost is not None:
            raise self.lost
        for view in (*reads, *writes):
            begin, end = extent(view.owner)  # type: ignore[arg-type]
            assert begin <= view.address <= view.address + view.n_bytes <= end, "not kept alive"
            for work in self.device.pending() if self.device else []:
                assert not any(overlap(view.extent, one) for one in work.touched), "not copied yet"
        call = WireCall(name, reads, writes)
        call.effect = effect
        if not how.get("async_op"):
            call.finish()
            return call if how.get("work") else None
        self.calls.append(call)
        return call

    def all_reduce(self, data: BufferView, op: object, **how: Any) -> Any:
        return self._post("all_reduce", [data], [data], lambda: numbers(data).mul_(2).add_(3), how)

    def all_gather(self, outputs: Any, data: BufferView, **how: Any) -> Any:
        blocks = _blocks(outputs)

        def effect() -> None:
            own = numbers(data).clone()
            for rank, block in enumerate(blocks):
                numbers(block).copy_(own + 3 * (rank == 0))

        return self._post("all_gather", [data], blocks, effect, how)

    def send(self, data: BufferView, to: int, tag: int, **how: Any) -> Any:
        return self._post("send", [data], [], lambda: None, how)


def _blocks(given: Any) -> list[BufferView]:
    if isinstance(given, list):
        return given
    n = given.n_elems // 2
    step = n * given.n_bytes // given.n_elems if given.n_elems else 0
    return [given._replace(address=given.address + r * step, n_elems=n) for r in range(2)]
