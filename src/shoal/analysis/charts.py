"""Makes pages with bars of times and timelines of NICs, without scripts or external files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Final

from shoal.plan.text import show_us

if TYPE_CHECKING:
    from shoal.analysis.simulate.timeline import Span, Timeline

_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
<main><h1>{title}</h1><p>{note}</p>
{body}
</main>
"""
_WIDEST: Final = 10.0  # times the shortest bar; longer ones are cut
_N_COLUMNS: Final = 400  # of a timeline
_MOST_FIGURES: Final = 16  # timelines of different hosts on a page
_DOES: Final[Mapping[str, str]] = {
    "busy": "busy",
    "data": "waits for data of other hosts",
    "grant": "waits for a receiver's grant",
    "cores": "waits for its host's cores",
    "over": "all is sent",
}


def page_of(title: str, note: str, sections: Iterable[str]) -> str:
    """Return the page: a title and a note, which are text, and sections, which are HTML."""
    style, body = style_of("base.css") + style_of("charts.css"), "\n".join(sections)
    return _PAGE.format(title=escape(title), note=escape(note), style=style, body=body)


def style_of(name: str) -> str:
    """Return a style sheet; base.css has the colours and the font of every page."""
    return (resources.files("shoal.analysis") / "assets" / name).read_text(encoding="utf-8")


def section(title: str, note: str, figures: Iterable[str]) -> str:
    """Return a part of the page; figures are HTML, from the functions below."""
    body = "\n".join(figures)
    head = f"<h2>{escape(title)}</h2><p>{escape(note)}</p>"
    return f"<section>{head}<div class=figures>\n{body}</div></section>"


def bars(title: str, times_us: Mapping[str, float], chosen: str, why: str = "") -> str:
    """Return a bar for each time, the shortest first, and the reason for the one chosen."""
    best_us = min(times_us.values()) or 1.0
    longest = min(_WIDEST, max(times_us.values()) / best_us)
    rows = []
    for name, time_us in sorted(times_us.items(), key=lambda item: (item[1], item[0] != chosen)):
        ratio = time_us / best_us
        how = " class=chosen" * (name == chosen) or " class=cut" * (ratio > _WIDEST)
        width = f"width:{100 * min(1.0, ratio / longest):.1f}%"
        bar = f'<span>{escape(name)}</span><i><b style="{width}"></b></i>'
        rows.append(f"<li{how}>{bar}<output>{show_us(time_us)}</output></li>\n")
    text = f"<ol class=bars>\n{''.join(rows)}</ol><p>{escape(why)}</p>"
    return f"<figure><h3>{escape(title)}</h3>{text}</figure>"


def legend() -> str:
    """Return the legend for the colours of `timelines`."""
    keys = "".join(f"<li class={what}><span>{words}</span></li>" for what, words in _DOES.items())
    return f"<ul class=legend>{keys}</ul>"


def timelines(timeline: Timeline) -> list[str]:
    """Return a picture of the NICs of each host; hosts with equal shares have one picture."""
    alike: dict[str, list[int]] = defaultdict(list)
    for host in sorted(timeline.out):
        shares: dict[str, float] = defaultdict(float)
        for begin_us, end_us, what in timeline.out[host]:
            shares[what] += (end_us - begin_us) / timeline.time_us
        words = [f"{_DOES[what]} {shares[what]:.0%}" for what in _DOES if shares[what] >= 0.005]
        alike[", ".join(words)].append(host)
    axis = f"<p class=axis><span>0</span><span>{show_us(timeline.time_us)}</span></p>"
    figures = []
    for words_out, (host, *others) in list(alike.items())[:_MOST_FIGURES]:
        title = f"host {host}" + f" and {len(others)} more like it" * bool(others)
        out = _strip(timeline.out[host], timeline.time_us)
        into = _strip(timeline.into.get(host, ()), timeline.time_us)
        strips = f"<p>out: {words_out}</p>{out}<p>in</p>{into}{axis}"
        figures.append(f"<figure class=nic><h3>{title}</h3>{strips}</figure>")
    return figures


def _strip(spans: Sequence[Span], time_us: float) -> str:
    """Return the shares of each column of time, one above the other, as one picture."""
    columns = {what: [0.0] * _N_COLUMNS for what in _DOES}
    for begin_us, end_us, what in spans:
        begin, end = (at_us / time_us * _N_COLUMNS for at_us in (begin_us, end_us))
        for column in range(int(begin), min(_N_COLUMNS, int(end) + 1)):
            columns[what][column] += min(end, column + 1) - max(begin, column)
    heights, paths = [0.0] * _N_COLUMNS, []
    for what, shares in columns.items():
        heights = [height + share for height, share in zip(heights, shares, strict=True)]
        paths.append(f'<path class={what} d="{_outline(heights)}"/>')
    picture = "".join(reversed(paths))  # a lower one covers the part below it
    return f'<svg viewBox="0 0 {_N_COLUMNS} 1" preserveAspectRatio="none">{picture}</svg>'


def _outline(heights: Iterable[float]) -> str:
    """Return the path around columns of these heights, merging equal neighbours."""
    path, end = "M0 1", 0
    for height, run in groupby(f"{1 - min(1.0, height):.3g}" for height in heights):
        end += len([*run])
        path += f"V{height}H{end}"
    return f"{path}V1Z"
