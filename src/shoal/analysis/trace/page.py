"""Writes a trace as data, and as one page that plays it in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from shoal.analysis.charts import style_of
from shoal.analysis.description import describe
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.analysis.trace.tracer import Held, Message, RankPlace, Round, Trace
    from shoal.schedule import Contract, Place

_SCRIPTS: Final = ("held.js", "layout.js", "draw.js", "words.js", "play.js")
_MAX_RANKS: Final = 128
"""The page of a larger ring has tens of megabytes, and cards of a few pixels."""
_MARK: Final = re.compile(r"\{\{(STYLE|SCRIPT|TRACE)\}\}")
"""The marks that parts replace, in one pass, so that a part cannot contain a mark."""


def json_of(trace: Trace) -> str:
    """Return a trace as JSON, with numbers for ranks, places and values.

    - `places`: of each rank, [buffer, chunk] for every place; a place's number is its index here;
    - `values`: [chunk, ranks in the order of their folding, whether finished];
    - `postcondition`: of each rank, [place, chunk, first rank, last rank, whether finished];
    - `rounds`: in `messages` [sender, its place, receiver, its place, whether folded, value], and
      in `writes` [rank, place, value] for each change in the round. Round 0 is the start.
    """
    description = describe(trace.algorithm)
    encoder = _Encoder(trace)
    rounds = [encoder.round(one) for one in trace.rounds]
    return json.dumps(
        {
            "collective": trace.collective,
            "algorithm": trace.name,
            "ranks": trace.size,
            "root": trace.root if trace.algorithm.rooted else None,
            "hosts": trace.hosts,
            "summary": description.summary,
            "remarks": description.remarks,
            "fields": description.fields,
            "places": [[[p.buffer.name.lower(), p.chunk] for p in ps] for ps in trace.places],
            "values": encoder.values,
            "postcondition": [
                encoder.postcondition(r, one) for r, one in enumerate(trace.contracts)
            ],
            "rounds": rounds,
        },
        separators=(",", ":"),
    )


def page_of(trace: Trace) -> str:
    """Return one HTML page that plays the trace and loads nothing else; see `require_playable`."""
    require_playable(trace.size)
    # "</script>" would end the data; within JSON, "<" can only be inside of a string.
    parts = {
        "STYLE": style_of("base.css") + _file("style.css"),
        "SCRIPT": "\n".join(map(_file, _SCRIPTS)),
        "TRACE": json_of(trace).replace("<", "\\u003c"),
    }
    return _MARK.sub(lambda mark: parts[mark[1]], _file("page.html"))


def require_playable(size: int) -> None:
    """Raise UsageError if there are too many ranks to see anything. Call it before tracing."""
    if size > _MAX_RANKS:
        raise UsageError(f"a page shows at most {_MAX_RANKS} ranks, not {size}")


def _file(name: str) -> str:
    return (resources.files("shoal.analysis.trace") / "assets" / name).read_text(encoding="utf-8")


class _Encoder:
    """Numbers the places and values of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.values: list[Held] = []
        """The values numbered so far."""
        self._numbers: dict[Held, int] = {}
        self._places: list[Mapping[Place, int]] = [
            {place: number for number, place in enumerate(places)} for places in trace.places
        ]

    def round(self, one: Round) -> Mapping[str, Any]:
        return {
            "messages": [self._message(message) for message in one.messages],
            "writes": [self._write(where, value) for where, value in one.writes.items()],
        }

    def postcondition(self, rank: int, contract: Contract) -> list[tuple[int, int, int, int, bool]]:
        return [
            (self._places[rank][place], want.chunk, want.ranks[0], want.ranks[-1], want.finished)
            for place, want in contract.postcondition.items()
        ]

    def _message(self, message: Message) -> tuple[int, int, int, int, bool, int]:
        source = self._places[message.sender][message.source]
        target = self._places[message.receiver][message.target]
        value = self._value(message.value)
        return message.sender, source, message.receiver, target, message.fold, value

    def _write(self, where: RankPlace, value: Held) -> tuple[int, int, int]:
        rank, place = where
        return rank, self._places[rank][place], self._value(value)

    def _value(self, value: Held) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]
