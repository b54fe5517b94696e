"""The windows of servers: the segments that workers may send, over all chunks in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shoal.schedule import Buffer, Recv, Send

if TYPE_CHECKING:
    from shoal.analysis.dataflow import Dataflow

# Segments that a server holds before they are folded; from 16 on, times hardly change.
_WINDOW: Final = 64


@dataclass(slots=True)
class _Window:
    chunks: list[list[int]] = field(default_factory=list)
    """The Recvs of each chunk, in the order of its folds."""
    begins: list[int] = field(default_factory=lambda: [0])
    """Segments before each chunk, and before the end."""
    n_folded: int = 0
    """Chunks that are complete."""


class ServerWindows:
    """The windows of all servers of a schedule. A server receives only into scratch.

    All workers may send a segment at the same time, regardless of the order of folds.
    """

    def __init__(self, flow: Dataflow, n_segments: Sequence[int]) -> None:
        self._n_segments = n_segments
        self._upto = [0] * len(flow.steps)
        self.servers = _servers_of(flow)
        self._windows = {server: _Window() for server in self.servers}
        self._of_step: dict[int, _Window] = {}
        self._of_last: dict[int, _Window] = {}
        of_chunk: defaultdict[int, list[int]] = defaultdict(list)
        for number, place in enumerate(flow.writes):
            if flow.rank_of[number] in self.servers and isinstance(flow.steps[number], Recv):
                of_chunk[place].append(number)
        self.before: dict[int, int] = {}
        """For each Send to or from a server, the segments of earlier chunks on its link."""
        begin_of: dict[int, int] = {}
        for place, recvs in of_chunk.items():
            window = self._windows[flow.rank_of[recvs[0]]]
            begin_of[place] = window.begins[-1]
            self.before.update(dict.fromkeys((flow.partner_of[r] for r in recvs), begin_of[place]))
            window.chunks.append(recvs)
            window.begins.append(window.begins[-1] + n_segments[recvs[0]])
            self._of_step.update(dict.fromkeys(recvs, window))
            self._of_last[recvs[-1]] = window

        for number, place in enumerate(flow.reads):
            if place in begin_of and isinstance(flow.steps[number], Send):
                self.before[number] = begin_of[place]

    def __contains__(self, step: int) -> bool:
        return step in self._of_step

    def opened_first(self, done: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the Recvs that may begin at once, and the end of their segments; see `opened`."""
        for window in self._windows.values():
            yield from self._opened(window, done)

    def opened(self, step: int, done: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the Recvs that may continue after this one has, and the end of their segments.

        Args:
            done: the number of segments done, by step.
        """
        if step in self._of_last:
            yield from self._opened(self._of_last[step], done)

    def _opened(self, window: _Window, done: Sequence[int]) -> Iterator[tuple[int, int]]:
        last = len(window.chunks)
        while window.n_folded < last and self._left(window, done) == 0:
            window.n_folded += 1
        at = window.n_folded
        folded = window.begins[at + 1] - self._left(window, done) if at < last else 0
        for recvs, begin in zip(window.chunks[at:], window.begins[at:], strict=False):
            if begin >= folded + _WINDOW:
                return
            for recv in recvs:
                upto = min(self._n_segments[recv], folded + _WINDOW - begin)
                if upto > self._upto[recv]:
                    self._upto[recv] = upto
                    yield recv, upto

    def _left(self, window: _Window, done: Sequence[int]) -> int:
        """Return the number of segments still to be folded in the first incomplete chunk."""
        last = window.chunks[window.n_folded][-1]
        return self._n_segments[last] - done[last]


def _servers_of(flow: Dataflow) -> frozenset[int]:
    into = {
        (rank, flow.place(place).buffer)
        for rank, place in zip(flow.rank_of, flow.writes, strict=True)
        if place >= 0
    }
    own = {rank for rank, buffer in into if buffer is not Buffer.SCRATCH}
    return frozenset(rank for rank, _ in into) - own
