"""Shapes and words as SVG, in colours that are readable on light and on dark paper."""

from __future__ import annotations

import math
from html import escape
from typing import Final, NamedTuple

COLOURS: Final = (
    *("#3f7fe0", "#d9772b", "#2f9e62", "#a85cc2", "#d04a66", "#1f97aa", "#9a7d1f", "#7274d4"),
)
"""Colours for series. All have about the same weight on white and on black."""
NODE: Final = 15
"""The radius of a rank."""

_STYLE: Final = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #25282d; }
text.soft { fill: #6d7178; font-size: 12px; }
.rank { fill: #ffffff; stroke: #6d7178; stroke-width: 1.3; }
.host { fill: none; stroke: #b9b6af; }
.time { stroke: #d8d5ce; }
.edge { fill: none; stroke: #8a8e95; }
.tip { fill: #8a8e95; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e4df; } text.soft { fill: #9a9fa8; }
  .rank { fill: #1d2025; stroke: #9a9fa8; } .host { stroke: #4a4f58; } .time { stroke: #3a3f47; }
}
"""


class Point(NamedTuple):
    """A point of the drawing, in pixels."""

    x: float
    y: float


class Drawing:
    """An SVG under construction. Lines lie below ranks, regardless of the order of calls."""

    def __init__(self) -> None:
        self._below: list[str] = []
        self._above: list[str] = []
        self._points: list[Point] = []

    def rank(self, at: Point, name: object, colour: str = "") -> None:
        """Draw a circle with the name of a rank."""
        self._cover(at, NODE + 2)
        style = f' style="stroke:{colour};stroke-width:2.2"' if colour else ""
        self._above.append(f'<circle class="rank" {_xy("c", at)} r="{NODE}"{style}/>')
        self.words(Point(at.x, at.y + 4.5), str(name), anchor="middle")

    def dot(self, at: Point) -> None:
        """Draw a dot for a rank at a point in time."""
        self._cover(at, 4)
        self._above.append(f'<circle class="tip" {_xy("c", at)} r="2.5"/>')

    def words(self, at: Point, text: str, anchor: str = "start", soft: bool = False) -> None:
        """Write a line of text."""
        long = 7.4 * len(text)
        start = at.x - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
        self._points += [Point(start, at.y - 12), Point(start + long, at.y + 4)]
        how = f' text-anchor="{anchor}"' + (' class="soft"' if soft else "")
        self._above.append(f"<text {_xy('', at)}{how}>{escape(text)}</text>")

    def box(self, corner: Point, opposite: Point, name: str) -> None:
        """Draw a host as a box around its ranks."""
        self._points += [corner, opposite]
        size = f'width="{_n(opposite.x - corner.x)}" height="{_n(opposite.y - corner.y)}"'
        self._below.append(f'<rect class="host" {_xy("", corner)} {size} rx="12"/>')
        self.words(Point(corner.x + 4, corner.y - 8), name, soft=True)

    def line(self, a: Point, b: Point) -> None:
        """Draw the time axis of a rank."""
        self._below.append(f'<path class="time" d="M{_p(a)}L{_p(b)}"/>')

    def arrow(  # noqa: PLR0913 - arrows look different in many ways
        self,
        a: Point,
        b: Point,
        *,
        width: float = 1.4,
        bend: float = 0.0,
        both: bool = False,
        colour: str = "",
        gap: float = NODE + 3,
        title: str = "",
    ) -> None:
        """Draw a line from a to b with one tip, or with two.

        Args:
            bend: the distance by which it bends to the right, as a part of its length.
            gap: the distance that it keeps from a and b.
        """
        turn = Point((a.x + b.x) / 2 - (b.y - a.y) * bend, (a.y + b.y) / 2 + (b.x - a.x) * bend)
        tip = 5 + 1.6 * width
        start, end = _toward(a, turn, gap), _toward(b, turn, gap)
        self._points.append(Point((turn.x + (a.x + b.x) / 2) / 2, (turn.y + (a.y + b.y) / 2) / 2))
        begin = _toward(start, turn, tip * 0.8) if both else start
        stop = _toward(end, turn, tip * 0.8)
        stroke = f"stroke-width:{_n(width)}" + (f";stroke:{colour}" if colour else "")
        parts = [f'<path class="edge" style="{stroke}" d="M{_p(begin)}Q{_p(turn)} {_p(stop)}"/>']
        parts += [_tip(end, turn, tip, colour)] + ([_tip(start, turn, tip, colour)] if both else [])
        about = f"<title>{escape(title)}</title>" if title else ""
        self._below.append(f"<g>{about}{''.join(parts)}</g>")

    def svg(self, title: str) -> str:
        """Return the drawing, cropped to its contents."""
        left, top = (min(ns) - 10 for ns in zip(*self._points, strict=True))
        right, bottom = (max(ns) + 10 for ns in zip(*self._points, strict=True))
        width, height = _n(right - left), _n(bottom - top)
        box = f'viewBox="{_n(left)} {_n(top)} {width} {height}"'
        namespace = 'xmlns="http://www.w3.org/2000/svg"'
        lines = [
            f'<svg {namespace} width="{width}" height="{height}" {box} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            *self._below,
            *self._above,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _cover(self, at: Point, radius: float) -> None:
        self._points += [Point(at.x - radius, at.y - radius), Point(at.x + radius, at.y + radius)]


def _toward(a: Point, b: Point, by: float) -> Point:
    far = math.hypot(b.x - a.x, b.y - a.y) or 1.0
    return Point(a.x + (b.x - a.x) * by / far, a.y + (b.y - a.y) * by / far)


def _tip(at: Point, away: Point, long: float, colour: str) -> str:
    foot = _toward(at, away, long)
    across = Point((foot.y - at.y) * 0.36, (at.x - foot.x) * 0.36)
    corners = [
        at,
        Point(foot.x + across.x, foot.y + across.y),
        Point(foot.x - across.x, foot.y - across.y),
    ]
    style = f' style="fill:{colour}"' if colour else ""
    return f'<path class="tip"{style} d="M{"L".join(map(_p, corners))}Z"/>'


def _xy(prefix: str, at: Point) -> str:
    return f'{prefix}x="{_n(at.x)}" {prefix}y="{_n(at.y)}"'


def _p(at: Point) -> str:
    return f"{_n(at.x)} {_n(at.y)}"


def _n(number: float) -> str:
    """Format a number with one decimal: short, and the same on every machine."""
    return f"{number:.1f}".rstrip("0").rstrip(".").replace("-0", "0", number == 0)
