"""The parts of every layout: ranks at their places, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

from shoal.analysis.draw.svg import Drawing, Point

if TYPE_CHECKING:
    from shoal.analysis.draw.shape import Link
    from shoal.analysis.trace.tracer import Trace

Value = TypeVar("Value")

THINNEST: Final = 1.2
"""Pixels of a line."""


_MANY: Final = 24
"""Lines from which on they are drawn thinner."""


def always(value: Value) -> Callable[[int, int], Value]:
    """The same bend or colour for every link."""
    return lambda a, b: value


class Picture:
    """A drawing of one schedule."""

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
        bend, colour = bend or always(0.0), colour or always("")
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
                width=THINNEST + thick * max(n, back or 0) / most,
                bend=bend(a, b),
                both=back is not None,
                colour=colour(a, b),
                title=title,
            )

    def tell_most(
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
