"""Writes a trace as text: the contents of every rank, state by state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from shoal.analysis.description import describe
from shoal.plan.text import counted
from shoal.schedule import Buffer, Place

if TYPE_CHECKING:
    from shoal.analysis.trace.tracer import Held, RankPlace, Round, Trace

_NOTHING: Final = "-"
_SHORTEST: Final = 8
"""The least columns of a place: enough for the first contributions."""


def text_of(trace: Trace, width: int) -> Iterator[str]:
    """Yield the lines of a trace, cut to `width` columns; the last line counts the cuts."""
    n_rounds = len(trace.rounds) - 1
    counts = f"{counted(trace.size, 'rank')}, {counted(n_rounds, 'round')}"
    yield f"{trace.collective} {trace.name}: {counts}"
    yield from _wrapped(describe(trace.algorithm).summary.split(" "), width)
    table = _Table(trace, width)
    for number, (one, held) in enumerate(zip(trace.rounds, trace.states(), strict=True)):
        yield ""
        if number:
            yield from _wrapped(f"round {number} of {n_rounds}: {_verbs(one)}".split(" "), width)
            messages = sorted(one.messages, key=lambda m: (m.sender, m.receiver))
            arrows = [f"{m.sender}->{m.receiver} {place_name(m.target)}" for m in messages]
            yield from _wrapped(arrows, width, indent="  ", gap="   ")
        else:
            yield "start"
        yield from table.lines(held)
    yield ""
    proved = f"Proved: every rank ends with what {trace.collective} must leave."
    yield from _wrapped(proved.split(" "), width)
    if table.cut:
        cut = f"Cut to {width} columns ({table.cut}); --json writes everything."
        yield from _wrapped(cut.split(" "), width)


def place_name(place: Place) -> str:
    """Return the name of a place: "chunk 3" in the caller's one tensor, else "output 3"."""
    buffer = "chunk" if place.buffer is Buffer.DATA else place.buffer.name.lower()
    return f"{buffer} {place.chunk}"


class _Table:
    """A table with a row for each rank and a column for each place."""

    def __init__(self, trace: Trace, width: int) -> None:
        self._places = sorted(set().union(*trace.places))
        self._of_rank = [set(places) for places in trace.places]
        self._label = len(f"rank {trace.size - 1}")
        longest = max(
            (len(str(value)) for one in trace.rounds for value in one.writes.values()), default=1
        )
        names = [len(place_name(place)) for place in self._places]
        room = width - self._label
        fair = max(room // max(1, len(self._places)) - 2, _SHORTEST, *names)
        self._width = min(max(longest, *names), fair)
        n_shown = min(len(self._places), max(1, room // (self._width + 2)))
        self._shown = self._places[:n_shown]
        n_hidden = len(self._places) - n_shown
        notes = [f"{counted(n_hidden, 'place')} of each rank not shown"] if n_hidden else []
        if longest > self._width:
            notes.append("longer values end in …")
        self.cut = ", ".join(notes)

    def lines(self, held: Mapping[RankPlace, Held]) -> Iterator[str]:
        """Yield the contents of every rank now."""
        yield self._line("", [place_name(place) for place in self._shown])
        for rank in range(len(self._of_rank)):
            cells = [self._cell(held, rank, place) for place in self._shown]
            yield self._line(f"rank {rank}", cells)

    def _cell(self, held: Mapping[RankPlace, Held], rank: int, place: Place) -> str:
        if place not in self._of_rank[rank]:
            return ""
        text = str(held.get((rank, place), _NOTHING))
        return text if len(text) <= self._width else text[: self._width - 1] + "…"

    def _line(self, label: str, cells: list[str]) -> str:
        parts = [label.ljust(self._label), *(cell.ljust(self._width) for cell in cells)]
        return "  ".join(parts).rstrip()


def _verbs(one: Round) -> str:
    folds = {message.fold for message in one.messages}
    verbs = {True: "folded into what is held", False: "stored"}
    actions = " or ".join(verbs[fold] for fold in sorted(folds, reverse=True))
    return f"{counted(len(one.messages), 'message')}, {actions}"


def _wrapped(words: list[str], width: int, indent: str = "", gap: str = " ") -> Iterator[str]:
    line = indent
    for word in words:
        if len(line) > len(indent) and len(line) + len(gap) + len(word) > width:
            yield line
            line = indent
        line += (gap if len(line) > len(indent) else "") + word
    if line.strip():
        yield line
