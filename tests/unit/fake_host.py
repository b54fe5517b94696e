"""The other GPU of a host, and the order of both: rank 1 of 2, done by the test."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from unit.fake_device import FakeDevice, FakeStream, Waiting, Work, extent, overlap, plain

from shoal.frontend.torch.gpu.local_calls import part_of

if TYPE_CHECKING:
    import torch

    from shoal.frontend.torch.gpu.local_order import Turn

RANK, SIZE = 1, 2
ELSEWHERE = 42.0  # what the other GPU's part is in the end


class HostOrder:
    """The order of the host: the other rank is ready, and is told what is next, by the test."""

    def __init__(self) -> None:
        self.n_calls = self.n_first = 0
        self.ready_here: list[Turn] = []
        self.said: deque[Turn] = deque()
        self.begun: list[Turn] = []
        self.closed = False

    def add(self, timeout_s: float) -> int:
        self.n_calls += 1
        return self.n_calls - 1

    def ready(self, turn: Turn, what: str, timeout_s: float) -> None:
        self.ready_here.append(turn)

    def may_be_next(self) -> list[Turn]:
        return [t for t in self.ready_here if t.half or t.call == self.n_first]

    def say(self, turn: Turn) -> None:
        self.ready_here.remove(turn)
        self.n_first += turn.half == 0
        self.said.append(turn)

    def next(self) -> Turn | None:
        if not self.said:
            return None
        self.begun.append(self.said.popleft())
        return self.begun[-1]

    def close(self) -> None:
        self.closed = True


class FakeCollectives:
    """Gives its stream what the GPUs of the host would do, and looks whether it can go at once."""

    rank, size = RANK, SIZE

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.aborted = self.closed = 0
        self.fails = False

    def reduce_scatter(self, stream: FakeStream, flat: torch.Tensor) -> None:
        memory = plain(flat)

        def go() -> None:
            for begin, end in part_of(memory.numel(), RANK, SIZE):
                memory[begin:end].mul_(2).add_(3)
            for begin, end in part_of(memory.numel(), 0, SIZE):
                memory[begin:end] = -7.0  # NCCL says nothing of what lies there

        self._give(stream, flat, go)

    def all_gather(self, stream: FakeStream, flat: torch.Tensor) -> None:
        memory = plain(flat)

        def go() -> None:
            for begin, end in part_of(memory.numel(), 0, SIZE):
                memory[begin:end] = ELSEWHERE

        self._give(stream, flat, go)

    def _give(self, stream: FakeStream, flat: torch.Tensor, go: Callable[[], None]) -> None:
        if self.fails:
            raise RuntimeError("NCCL has failed")
        whole = extent(flat)
        for other in self.device.streams:
            for work in other.queue:
                if isinstance(work, Work) and other is not stream:
                    touched = [*work.reads, *work.writes]
                    assert not any(overlap(whole, each) for each in touched), "not ready"
        assert not any(isinstance(each, Waiting) for each in stream.queue), "not at once"
        self.device.used.add((flat.untyped_storage().data_ptr(), stream.name))
        self.device.give(stream, go, [whole], [whole])

    def abort(self) -> None:
        self.aborted += 1

    def close(self) -> None:
        self.closed += 1


class NoThread:
    def submit(self, go: Callable[[], None]) -> None:
        pass

    def finish(self) -> None:
        pass
