"""The dataflow of a whole schedule: the steps that each step waits for. Used by all analyses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from shoal.errors import ProofError
from shoal.schedule import Buffer, Copy, Place, Recv, Send, Step

_N_BUFFERS: Final = len(Buffer)


class Dataflow:
    """All ranks' steps in one numbering, with the places they touch and the steps they wait for.

    Steps and places are plain numbers, so that a run over them costs little: about 2 us a step.
    ProofError if the peer of a step is not another rank, or a Send or Recv has no counterpart.
    """

    def __init__(self, schedule: Sequence[Sequence[Step]]) -> None:
        self.size = len(schedule)
        self.steps: list[Step] = []
        self.rank_of: list[int] = []
        """The rank of each step."""
        self.partner_of: list[int] = []
        """For each step, the step at the other end of a Send or Recv; -1 for other steps."""
        self.reads: list[int] = []
        """The place that each step reads, -1 if none. A fold's target does not count."""
        self.writes: list[int] = []
        """The place that each step stores, folds into or finishes, -1 if none."""
        self.waits_for: list[list[int]] = []
        """For each step, the steps of the same rank that must come first: both touch a place."""
        self.waited_by: list[list[int]] = []
        """For each step, the steps that wait for it."""
        self.first_of: list[int] = []
        """The first step of each rank."""
        self._sends: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._recvs: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, steps in enumerate(schedule):
            self._add_rank(rank, steps)
        self._match()

    def number(self, rank: int, place: Place) -> int:
        """Return the number of a rank's place."""
        return (place.chunk * _N_BUFFERS + place.buffer) * self.size + rank

    def place(self, number: int) -> Place:
        """Return the place with this number, without its rank."""
        chunk, buffer = divmod(number // self.size, _N_BUFFERS)
        return Place(Buffer(buffer), chunk)

    def name(self, step: int) -> str:
        """Return the name of a step for messages."""
        rank = self.rank_of[step]
        return f"rank {rank} step {step - self.first_of[rank]} ({self.steps[step]})"

    def rounds(self, order: Sequence[int]) -> list[int]:
        """Return, for each step, the transfers in the longest chain that ends with it.

        Args:
            order: every step, after those it waits for and after the Send that it receives.
        """
        over = [0] * len(self.steps)
        for step in order:
            longest = 0
            for earlier in self.waits_for[step]:
                longest = max(longest, over[earlier])
            if type(self.steps[step]) is Send:
                longest += 1
            elif self.partner_of[step] >= 0:
                longest = max(longest, over[self.partner_of[step]])
            over[step] = longest
        return over

    def _add_rank(self, rank: int, steps: Sequence[Step]) -> None:
        self.first_of.append(len(self.steps))
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        for number, step in enumerate(steps, len(self.steps)):
            self.steps.append(step)
            self.rank_of.append(rank)
            self.partner_of.append(-1)
            if isinstance(step, (Send, Recv)):
                self._add_end(rank, number, step)
            reads, writes = self._touched(rank, step)
            self.reads.append(reads)
            self.writes.append(writes)
            waits = [writer[place] for place in (reads, writes) if place in writer]
            if writes >= 0:
                waits += readers.pop(writes, ())
                writer[writes] = number
            if reads >= 0:
                readers[reads].append(number)
            self.waits_for.append(waits)
            self.waited_by.append([])
            for earlier in waits:
                self.waited_by[earlier].append(number)

    def _touched(self, rank: int, step: Step) -> tuple[int, int]:
        place = (step.chunk * _N_BUFFERS + step.buffer) * self.size + rank
        if isinstance(step, Send):
            return place, -1
        if isinstance(step, Copy):
            return place, self.number(rank, Place(step.into_buffer, step.into))
        return -1, place

    def _add_end(self, rank: int, number: int, step: Send | Recv) -> None:
        if step.peer == rank or step.peer >= self.size:
            raise ProofError(f"{self.name(number)}: its peer is not another rank of the group")
        if isinstance(step, Send):
            self._sends[rank, step.peer].append(number)
        else:
            self._recvs[step.peer, rank].append(number)

    def _match(self) -> None:
        """Match the k-th Send of each pair with the k-th Recv."""
        for pair in sorted(self._sends.keys() | self._recvs.keys()):
            sends, recvs = self._sends[pair], self._recvs[pair]
            n_matched = min(len(sends), len(recvs))
            for unmatched in sends[n_matched:] + recvs[n_matched:]:
                verb = "receives" if unmatched in sends else "sends"
                peer = pair[1] if unmatched in sends else pair[0]
                raise ProofError(f"{self.name(unmatched)}: rank {peer} never {verb} it")
            for send, recv in zip(sends, recvs, strict=True):
                self.partner_of[send], self.partner_of[recv] = recv, send
