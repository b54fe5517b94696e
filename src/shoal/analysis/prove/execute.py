"""Executes a whole schedule on symbols, under the engine's rules for when a segment moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from shoal.analysis.prove.symbols import mask_of
from shoal.errors import ProofError
from shoal.schedule import Copy, Finish, Recv, Send

if TYPE_CHECKING:
    from shoal.analysis.dataflow import Dataflow
    from shoal.analysis.prove.symbols import Symbols
    from shoal.schedule import Value


class Execution:
    """One execution of all ranks' steps.

    A segment moves when its Send and its Recv are both ready, or into the receiver's staging
    memory when only its Send is and fewer than `window` segments of that Send are staged.

    Args:
        starts: the value of each place before the first step.
        fits: the values that a place may hold; places not named may hold any value.
    """

    def __init__(
        self,
        flow: Dataflow,
        symbols: Symbols,
        starts: Mapping[int, int],
        n_segments: int,
        window: int,
        fits: Mapping[int, Value] = MappingProxyType({}),
    ) -> None:
        self.held = [dict(starts) for _ in range(n_segments)]
        """For each segment, the value at each place."""
        self.order: list[int] = []
        """The steps in the order in which their first segment was done."""
        self.given: dict[int, int] = {}
        """For each step that writes, the value that its first segment stored or folded."""
        self.left: dict[int, int] = {}
        """For each step that writes, the value that its first segment left at the place."""
        self.max_staged = 0
        """The most segments that one rank had in its staging memory at any time."""
        self._flow, self._symbols = flow, symbols
        self._fits = {place: (value.chunk, ~mask_of(value.ranks)) for place, value in fits.items()}
        self._n_segments, self._window = n_segments, window
        # Nodes index the lists below: one segment of one step, step * n_segments + segment.
        self._n_waits = [len(waits) for waits in flow.waits_for for _ in range(n_segments)]
        self._posted = bytearray(len(self._n_waits))
        self._done = bytearray(len(self._n_waits))
        self._staged: dict[int, int] = {}
        self._n_staged_of_step = [0] * len(flow.steps)
        self._n_staged_of_rank = [0] * flow.size
        self._ready = deque(node for node, n in enumerate(self._n_waits) if n == 0)

    def run(self, newest_first: bool) -> None:
        """Do all steps, always taking the newest or the oldest ready one.

        Raises ProofError for a step that is not allowed, or that waits forever. Takes about 3 us
        for each segment of a step.
        """
        take = self._ready.pop if newest_first else self._ready.popleft
        partner_of, steps = self._flow.partner_of, self._flow.steps
        while self._ready:
            node = take()
            step, segment = divmod(node, self._n_segments)
            partner = partner_of[step]
            if partner < 0:
                value = -1 if type(steps[step]) is Finish else self._get(step, segment)
                self._put(step, segment, value)
                self._complete(node)
            elif type(steps[step]) is Send:
                self._send(node, step, partner, segment)
            else:
                self._recv(node, step, partner, segment)
        if not all(self._done):
            raise ProofError(f"deadlock: {self._circle()}")

    def _send(self, node: int, step: int, recv: int, segment: int) -> None:
        there = recv * self._n_segments + segment
        if self._posted[there]:
            self._put(recv, segment, self._get(step, segment))
            self._complete(node)
            self._complete(there)
        elif self._n_staged_of_step[step] < self._window:
            self._staged[there] = self._get(step, segment)
            self._count_staged(step, recv, 1)
            self._complete(node)
        else:
            self._posted[node] = 1

    def _recv(self, node: int, step: int, send: int, segment: int) -> None:
        there = send * self._n_segments + segment
        if node in self._staged:
            self._put(step, segment, self._staged.pop(node))
            self._complete(node)
            self._count_staged(send, step, -1)
            self._stage_next(send, step)
        elif self._posted[there]:
            self._put(step, segment, self._get(send, segment))
            self._complete(there)
            self._complete(node)
        else:
            self._posted[node] = 1

    def _count_staged(self, send: int, recv: int, change: int) -> None:
        self._n_staged_of_step[send] += change
        rank = self._flow.rank_of[recv]
        self._n_staged_of_rank[rank] += change
        self.max_staged = max(self.max_staged, self._n_staged_of_rank[rank])

    def _stage_next(self, send: int, recv: int) -> None:
        """Give freed staging memory to a segment that waits for it."""
        for segment in range(self._n_segments):
            node = send * self._n_segments + segment
            if self._posted[node] and not self._done[node]:
                self._send(node, send, recv, segment)
                return

    def _get(self, step: int, segment: int) -> int:
        place = self._flow.reads[step]
        if place not in self.held[segment]:
            raise ProofError(f"{self._flow.name(step)}: nothing was ever written there")
        return self.held[segment][place]

    def _put(self, step: int, segment: int, value: int) -> None:
        """Store or fold `value`, or finish the held value."""
        held, place, doing = self.held[segment], self._flow.writes[step], self._flow.steps[step]
        given = value
        try:
            if type(doing) is Finish:
                value = self._symbols.finish(self._held(held, place))
            elif isinstance(doing, (Recv, Copy)) and doing.fold:
                value = self._symbols.fold(self._held(held, place), value)
        except ProofError as why:
            raise ProofError(f"{self._flow.name(step)}: {why}") from None
        if place in self._fits:
            chunk, others = self._fits[place]
            if self._symbols.chunk[value] != chunk or self._symbols.ranks[value] & others:
                raise ProofError(
                    f"{self._flow.name(step)}: {self._symbols.name(value)} may not fit"
                )
        held[place] = value
        if segment == 0:
            self.given[step], self.left[step] = given, value

    def _held(self, held: dict[int, int], place: int) -> int:
        if place not in held:
            raise ProofError("nothing was ever written there")
        return held[place]

    def _complete(self, node: int) -> None:
        self._done[node] = 1
        step, segment = divmod(node, self._n_segments)
        if segment == 0:
            self.order.append(step)
        for later in self._flow.waited_by[step]:
            then = later * self._n_segments + segment
            self._n_waits[then] -= 1
            if self._n_waits[then] == 0:
                self._ready.append(then)

    def _circle(self) -> str:
        """Describe a cycle of steps that wait for each other."""
        node, seen = self._done.index(0), []
        while node not in seen:
            seen.append(node)
            node = self._waits_for(node)
        circle = [*seen[seen.index(node) :], node]
        steps = [self._flow.name(node // self._n_segments) for node in circle]
        return " waits for ".join(steps)

    def _waits_for(self, node: int) -> int:
        """Return an unfinished node that this unfinished node waits for."""
        step, segment = divmod(node, self._n_segments)
        earlier = (w * self._n_segments + segment for w in self._flow.waits_for[step])
        partner = self._flow.partner_of[step] * self._n_segments + segment
        return next((w for w in earlier if not self._done[w]), partner)
