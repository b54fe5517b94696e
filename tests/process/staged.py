"""A device made of threads, on which tensors of this process count as placed.

Threads copy whenever they get to it: like a GPU's driver, this device decides no order.
unit/test_torch_staging.py tries the orders. The calling thread is the current stream: work that is
ordered after copies waits for them.
"""

import contextlib
import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.frontend.torch.gpu import local_gpus, nccl, pieces
from shoal.frontend.torch.gpu.nccl import NcclCollectives
from shoal.frontend.torch.tensor_buffers import TensorBuffers


class ThreadStream:
    """Runs its tasks in order."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            go = self.queue.get()
            go()
            del go  # it holds memory


class ThreadDevice:
    place = torch.device("cpu")

    def __init__(self) -> None:
        self._streams = itertools.cycle([ThreadStream() for _ in range(4)])
        self.n_copies = 0
        self.n_bytes = 0  # copied
        self.n_sums = 0  # started among the devices of a host
        self._on_thread = threading.local()

    def check(self, doing: str) -> None: ...

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        return torch.full((n_bytes,), 0xEE, dtype=torch.uint8)

    def side_pair(self) -> tuple[ThreadStream, ThreadStream]:
        return self.side_stream(), self.side_stream()

    def side_stream(self) -> ThreadStream:
        stream = next(self._streams)
        if self._current() is not None:
            stream.queue.put(self.record().wait)
        return stream

    def _current(self) -> ThreadStream | None:
        return getattr(self._on_thread, "stream", None)

    @contextlib.contextmanager
    def on(self, stream: ThreadStream) -> Iterator[None]:
        before, self._on_thread.stream = self._current(), stream
        try:
            yield
        finally:
            self._on_thread.stream = before

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        self._give(lambda: tensor.div_(divisor))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.n_copies += 1
        self.n_bytes += source.nbytes
        mode = torch.is_inference_mode_enabled()

        def go() -> None:
            with torch.inference_mode(mode):  # the mode of the submitting thread
                to.copy_(source)

        self._give(go)

    def _give(self, go: Callable[[], object]) -> None:
        stream = self._current()
        assert stream is not None
        stream.queue.put(go)

    def record(self, stream: ThreadStream | None = None) -> threading.Event:
        event = threading.Event()
        stream = stream or self._current()
        if stream is None:  # the calling thread, which has run all its tasks
            event.set()
        else:
            stream.queue.put(event.set)
        return event

    def has_passed(self, event: threading.Event) -> bool:
        return event.is_set()

    def order_current(self, behind: threading.Event) -> None:
        assert behind.wait(30)

    def keep(self, tensor: torch.Tensor, stream: ThreadStream) -> None: ...

    def future(self, devices: Sequence[Any]) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def identity(self) -> str:
        return str(os.getpid())

    def collectives(self, store: Any, rank: int, size: int, timeout_s: float) -> NcclCollectives:
        made = NcclCollectives(self, store, rank, size, timeout_s)  # type: ignore[arg-type]
        self.n_sums = 0  # without the trial calls
        return made


class QueuedGloo:
    """Gloo with the methods of NCCL: a stream makes the calls.

    A failed call does not stop the stream, as on a GPU. Gloo's abort spares a call that is about to
    begin, so an aborted stream waits for none.
    """

    def __init__(
        self, device: ThreadDevice, store: Any, rank: int, size: int, timeout_s: float
    ) -> None:
        self._device = device
        self._backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._thread = ThreadStream()
        self._calls: list[threading.Event] = []  # set once a call has ended
        self._is_aborted = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_single"):
            raise AttributeError(name)  # its name in a later torch
        self._device.n_sums += name == "_reduce_scatter_base"

        def give(*args: Any) -> QueuedGloo:
            ended = threading.Event()

            def call() -> None:
                with contextlib.suppress(RuntimeError), torch.inference_mode():
                    getattr(self._backend, name)(*args).wait()
                ended.set()

            def go() -> None:
                self._calls.append(ended)
                if not self._is_aborted:
                    self._thread.queue.put(call)
                    ended.wait()

            self._device._give(go)
            return self

        return give

    def wait(self) -> None: ...

    def abort(self) -> None:
        self._is_aborted = True
        for ended in self._calls:
            ended.set()
        self._backend.abort()

    def shutdown(self) -> None: ...


@contextlib.contextmanager
def staging(piece_bytes: int = 1 << 14, local_bytes: int = 1 << 60) -> Iterator[ThreadDevice]:
    """Make every dense tensor of this process count as a device tensor.

    Args:
        local_bytes: the least size that the devices of a host sum among themselves.
    """
    device = ThreadDevice()
    own_memory = TensorBuffers._own_memory

    def on_device(self: TensorBuffers, tensor: torch.Tensor) -> Any:
        self.device = device
        return own_memory(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorBuffers, "_own_memory", on_device)
        patch.setattr(pieces, "PIECE_BYTES", piece_bytes)
        patch.setattr(local_gpus, "LEAST_BYTES", local_bytes)
        patch.setattr(nccl, "_backend", functools.partial(QueuedGloo, device))
        yield device
