"""Draws a schedule: lines for messages between ranks, thicker for more bytes.

The layout follows from the schedule alone: hosts as boxes, a ring, a line, one or two trees, all
ranks around a circle for at most two rounds, and otherwise the rounds from top to bottom.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

from shoal.analysis.draw.shape import (
    Link,
    TreeShape,
    depths_of,
    is_ring,
    links_of,
    path_of,
    trees_of,
)
from shoal.analysis.draw.svg import COLOURS, NODE, Drawing, Point
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.analysis.trace.tracer import Round, Trace

_MAX_RANKS: Final = 128
"""A drawing of more ranks would have many thousand pixels."""
_APART: Final = 56.0
"""Pixels between neighbours."""
_COLOUR: Final = {False: COLOURS[0], True: COLOURS[2]}
"""The colour of a message, by whether its value is completely folded."""
_THINNEST: Final = 1.2
"""Pixels of the thinnest line."""


_MANY: Final = 24
"""With this many lines or more, all are drawn thinner."""

_Value = TypeVar("_Value")


def draw(trace: Trace) -> str:
    """Return an SVG of a schedule that `require_drawable` allows, with a title for each link."""
    require_drawable(trace.size)
    picture, trees = _Picture(trace), trees_of(trace)
    few_rounds = len(trace.rounds) - 1 <= 2
    if max(trace.hosts) > 0:
        _draw_hosts(picture, trace)
    elif is_ring(trace):
        _draw_ring(picture, trace)
    elif len(trees) == 1 and path_of(trees[0]):
        _draw_line(picture, trees[0])
    elif len(trees) == 1 or (len(trees) == 2 and not few_rounds):
        _draw_trees(picture, trees)
    elif few_rounds:
        _draw_stars(picture, trace, trees if _folds(trace) else [])
    else:
        _draw_rounds(picture, trace)
    collective = trace.collective.replace("_", "-")
    return picture.drawing.svg(f"{trace.name} {collective} of {trace.size} ranks")


def require_drawable(size: int) -> None:
    """Raise UsageError if there are too many ranks for a picture. Call it before tracing."""
    if size > _MAX_RANKS:
        raise UsageError(f"a drawing shows at most {_MAX_RANKS} ranks, not {size}")


def _folds(trace: Trace) -> bool:
    return any(value.finished for one in trace.rounds for value in one.writes.values())


def _draw_line(picture: _Picture, tree: TreeShape) -> None:
    at = {rank: Point(1.5 * _APART * place, 0) for place, rank in enumerate(path_of(tree))}
    picture.connect(at, tree.links)
    picture.ranks(at)
    picture.caption_most(tree.links, Point(-NODE, 44))


def _circle(size: int, wider: float = 1.0) -> dict[int, Point]:
    """Return points around a circle: rank 0 on top, the others clockwise."""
    radius = wider * max(1.4 * _APART, size * _APART / (2 * math.pi)) if size > 1 else 0.0
    angles = [2 * math.pi * rank / size for rank in range(size)]
    return {r: Point(radius * math.sin(a), -radius * math.cos(a)) for r, a in enumerate(angles)}


def _draw_ring(picture: _Picture, trace: Trace) -> None:
    at, links = _circle(trace.size), links_of(trace)
    outward = -math.tan(math.pi / trace.size / 2)
    picture.connect(at, links, bend=_always(outward))
    picture.ranks(at)
    picture.caption_most(links, Point(0, max(y for _, y in at.values()) + 44), middle=True)


def _draw_stars(picture: _Picture, trace: Trace, trees: Sequence[TreeShape]) -> None:
    """Draw all ranks around a circle, with the tree of the first chunk in colour."""
    at, links = _circle(trace.size, wider=1.5), links_of(trace)
    star = {frozenset(link) for link in trees[0].links} if trees else set()
    picture.connect(at, links, colour=lambda a, b: COLOURS[0] if {a, b} in star else "")
    picture.ranks(at, {trees[0].root: COLOURS[0]} if trees else {})
    low = max(y for _, y in at.values()) + 44
    picture.caption_most(links, Point(0, low), middle=True)
    if trees:
        words = f"in colour: the folds of rank {trees[0].root}"
        picture.drawing.words(Point(0, low + 19), words, anchor="middle", soft=True)


def _draw_trees(picture: _Picture, trees: Sequence[TreeShape]) -> None:
    """Draw one tree, or two: the second below the first, with each rank in the same column."""
    top = 0.0
    for tree, colour in zip(trees, COLOURS if len(trees) > 1 else ("",), strict=False):
        depth = depths_of(tree)
        column = {rank: float(rank) for rank in depth} if len(trees) > 1 else _columns(tree)
        at = {r: Point(0.8 * _APART * column[r], top + 1.15 * _APART * depth[r]) for r in depth}
        picture.connect(at, tree.links, colour=_always(colour))
        picture.ranks(at, dict.fromkeys(tree.children, colour))
        top = max(y for _, y in at.values()) + 1.5 * _APART
    picture.caption_most(Counter(trees[0].links), Point(-NODE, top - 0.75 * _APART))


def _columns(tree: TreeShape) -> dict[int, float]:
    """Return the column of each rank: leaves in a row, every other rank above its children."""
    column: dict[int, float] = {}
    n_leaves = 0
    left = [(tree.root, False)]
    while left:
        rank, children_done = left.pop()
        children = tree.children.get(rank, ())
        if not children:
            column[rank] = n_leaves
            n_leaves += 1
        elif children_done:
            column[rank] = (column[children[0]] + column[children[-1]]) / 2
        else:
            left += [(rank, True), *((child, False) for child in reversed(children))]
    return column


def _draw_hosts(picture: _Picture, trace: Trace) -> None:
    """Draw a box for each host, with a column of ranks. Links of equal local ranks are rails."""
    hosts = trace.hosts
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    across, down, half = 3.2 * _APART, 1.3 * _APART, 0.95 * _APART
    at = {rank: Point(across * host, down * local[rank]) for rank, host in enumerate(hosts)}

    def bend(a: int, b: int) -> float:
        if hosts[a] == hosts[b]:
            return 0.0 if abs(local[a] - local[b]) == 1 else 0.32
        return 0.12 if local[a] == local[b] and abs(hosts[a] - hosts[b]) > 1 else 0.0

    def colour(a: int, b: int) -> str:
        is_rail = hosts[a] != hosts[b] and local[a] == local[b]
        return COLOURS[local[a] % len(COLOURS)] if is_rail else ""

    for host in range(max(hosts) + 1):
        bottom = down * (hosts.count(host) - 1) + 0.65 * _APART
        corner = Point(across * host - half, -0.65 * _APART)
        picture.drawing.box(corner, Point(across * host + half, bottom), f"host {host}")
    links = links_of(trace)
    picture.connect(at, links, bend=bend, colour=colour)
    picture.ranks(at)
    low = down * max(local) + 0.65 * _APART + 26
    for where, inside in (("inside hosts", True), ("between hosts", False)):
        some = {(a, b): n for (a, b), n in links.items() if (hosts[a] == hosts[b]) is inside}
        picture.caption_most(some, Point(-half, low), where=where)
        low += 19 if some else 0


def _draw_rounds(picture: _Picture, trace: Trace) -> None:
    """Draw a column for each rank, with rounds from top to bottom, such as a butterfly."""
    down, n_rounds = 1.3 * _APART, len(trace.rounds) - 1
    for rank in range(trace.size):
        x = _APART * rank
        picture.drawing.line(Point(x, 0), Point(x, n_rounds * down))
        for number in range(1, n_rounds + 1):
            picture.drawing.dot(Point(x, number * down))
    for number, one in enumerate(trace.rounds):
        _draw_round(picture, one, number, down)
    picture.ranks({rank: Point(_APART * rank, 0) for rank in range(trace.size)})
    finished = {message.value.finished for one in trace.rounds for message in one.messages}
    if True in finished:
        _draw_legend(picture, n_rounds * down + 36, finished)


def _draw_legend(picture: _Picture, y: float, finished: Collection[bool]) -> None:
    for number, (is_result, words) in enumerate(((False, "partial"), (True, "finished"))):
        if is_result in finished:
            x, colour = 110.0 * number, _COLOUR[is_result]
            picture.drawing.arrow(Point(x, y - 4), Point(x + 30, y - 4), gap=0, colour=colour)
            picture.drawing.words(Point(x + 38, y), words, soft=True)


def _draw_round(picture: _Picture, one: Round, number: int, down: float) -> None:
    links = Counter(
        (message.sender, message.receiver, message.value.finished) for message in one.messages
    )
    for (a, b, finished), n in sorted(links.items()):
        picture.drawing.arrow(
            Point(_APART * a, down * (number - 1) + (NODE if number == 1 else 0)),
            Point(_APART * b, down * number),
            width=_THINNEST + 1.8 * float(picture.part(n)),
            colour=_COLOUR[finished],
            gap=5,
            title=f"round {number}, {a} to {b}: {picture.share(n)}",
        )


def _always(value: _Value) -> Callable[[int, int], _Value]:
    return lambda a, b: value


class _Picture:
    def __init__(self, trace: Trace) -> None:
        self.drawing = Drawing()
        self._n_chunks = trace.algorithm.n_chunks(trace.size, trace.hosts)

    def ranks(self, at: Mapping[int, Point], colours: Mapping[int, str] | None = None) -> None:
        """Draw every rank at its place; some with a coloured rim."""
        for rank, point in at.items():
            self.drawing.rank(point, rank, (colours or {}).get(rank, ""))

    def connect(
        self,
        at: Mapping[int, Point],
        links: Mapping[Link, int],
        *,
        bend: Callable[[int, int], float] | None = None,
        colour: Callable[[int, int], str] | None = None,
    ) -> None:
        """Draw a line for each link, thicker for more chunks; one line for both directions."""
        bend, colour = bend or _always(0.0), colour or _always("")
        most, thick = max(links.values(), default=1), 1.8 if len(links) < _MANY else 0.4
        for (a, b), n in sorted(links.items()):
            back = links.get((b, a))
            if back is not None and a > b:
                continue
            title = f"{a} to {b}: {self.share(n)}"
            if back is not None:
                title += f"; {b} to {a}: {self.share(back)}"
            self.drawing.arrow(
                at[a],
                at[b],
                width=_THINNEST + thick * max(n, back or 0) / most,
                bend=bend(a, b),
                both=back is not None,
                colour=colour(a, b),
                title=title,
            )

    def caption_most(
        self, links: Mapping[Link, int], at: Point, *, where: str = "", middle: bool = False
    ) -> None:
        """Write the part of the buffer that the thickest line stands for."""
        if links:
            least, most = min(links.values()), max(links.values())
            each = "each line" if least == most else "the thickest line"
            words = f"{each}{where and ' ' + where}: {self.share(most)}"
            self.drawing.words(at, words, anchor="middle" if middle else "start", soft=True)

    def part(self, n_chunks: int) -> Fraction:
        """Return a number of chunks as a part of the collective's longest buffer."""
        return Fraction(n_chunks, self._n_chunks)

    def share(self, n_chunks: int) -> str:
        """Return `part` in words."""
        part = self.part(n_chunks)
        return "the buffer" if part == 1 else f"{part} of the buffer"
