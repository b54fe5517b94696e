"""Plots of few lines as SVG: both axes logarithmic, or the upright one from zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from shoal.analysis.draw.svg import COLOURS

_LEFT, _TOP, _WIDTH, _HEIGHT = 76.0, 40.0, 520.0, 280.0
_TITLE: Final = 22.0

# As in _svg.py: readable on light and on dark paper.
_STYLE: Final = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #25282d; }
text.soft { fill: #6d7178; font-size: 12px; }
.grid { stroke: #d8d5ce; }
.line { fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e4df; } text.soft { fill: #9a9fa8; } .grid { stroke: #3a3f47; }
}
"""


@dataclass(frozen=True)
class Plot:
    """Lines through points; the x of all points are marked below.

    Args:
        lines: by name: points, x above 0, y above 0 where `log_y`.
    """

    title: str
    x_name: str
    y_name: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_y: bool = False

    def svg(self) -> str:
        """Return the whole plot."""
        below = _TOP + _HEIGHT
        size = f'width="{_LEFT + _WIDTH + 150:.0f}" height="{below + 56:.0f}"'
        box = f'viewBox="0 0 {_LEFT + _WIDTH + 150:.0f} {below + 56:.0f}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_STYLE}</style>",
            _words(_LEFT, _TITLE, self.title),
            _words(_LEFT + _WIDTH / 2, below + 46, self.x_name, "middle", soft=True),
            _words(_LEFT - 8, _TOP - 14, self.y_name, "end", soft=True),
        ]
        for tick in self._ticks():
            y = self._y(tick)
            parts.append(f'<path class="grid" d="M{_LEFT:.0f} {y:.1f}H{_LEFT + _WIDTH:.0f}"/>')
            parts.append(_words(_LEFT - 8, y + 4, f"{tick:,g}", "end", soft=True))
        xs = sorted({x for points in self.lines.values() for x, _ in points})
        parts += [_words(self._x(x), below + 20, f"{x:,g}", "middle", soft=True) for x in xs]
        for colour, (name, points) in zip(COLOURS, self.lines.items(), strict=False):
            parts += self._line(colour, points)
            parts.append(_words(_LEFT + _WIDTH + 4, self._label_y(name), name, colour=colour))
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _line(self, colour: str, points: Sequence[tuple[float, float]]) -> list[str]:
        places = [(self._x(x), self._y(y)) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        return [
            f'<path class="line" style="stroke:{colour}" d="M{path}"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places),
        ]

    def _label_y(self, name: str) -> float:
        """Place a name beside its line's end, below the names of higher lines."""
        ends = sorted((self._y(points[-1][1]), other) for other, points in self.lines.items())
        y = 0.0
        for end_y, other in ends:
            y = max(end_y + 4, y + 16)
            if other == name:
                break
        return y

    def _ticks(self) -> list[float]:
        low, high = self._range()
        if self.log_y:
            powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
            return [10.0**power for power in powers]
        return [high * part / 4 for part in range(5)]

    def _range(self) -> tuple[float, float]:
        ys = [y for points in self.lines.values() for _, y in points]
        if self.log_y:
            return 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
        step = 10 ** math.floor(math.log10(max(ys)))
        return 0.0, next(step * n for n in (1, 2, 4, 8, 12) if step * n >= max(ys))

    def _x(self, x: float) -> float:
        xs = [x for points in self.lines.values() for x, _ in points]
        low, high = math.log(min(xs)), math.log(max(xs))
        return _LEFT + 16 + (_WIDTH - 32) * (math.log(x) - low) / (high - low)

    def _y(self, y: float) -> float:
        low, high = self._range()
        if self.log_y:
            y, low, high = math.log10(y), math.log10(low), math.log10(high)
        return _TOP + _HEIGHT * (1 - (y - low) / (high - low))


def _words(
    x: float, y: float, text: str, anchor: str = "start", *, soft: bool = False, colour: str = ""
) -> str:
    kind = ' class="soft"' if soft else ""
    kind += f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
