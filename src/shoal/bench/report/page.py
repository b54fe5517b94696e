"""Writes runs as one HTML page that loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Final

from shoal.bench.report.charts import charts_of, is_comparable, show_rate, svg_of
from shoal.plan.text import show_bytes, show_us

if TYPE_CHECKING:
    from shoal.bench.record import BenchRecord, CallName, Measured

_MARK: Final = re.compile(r"\{\{(TITLE|STYLE|RUNS|CALLS|MISSING)\}\}")
"""The marks that parts replace, in one pass, so that a part cannot contain a mark."""
_COLUMNS: Final = (
    *("size", "library", "p50", "p95", "p99", "bus bandwidth", "of the line", "beside shoal"),
    *("CPU of a rank", "sent by a rank", "wrong"),
)


def page_of(records: Sequence[BenchRecord]) -> str:
    """Return the page: the runs, and the pictures and numbers of every kind of call of any file."""
    calls = dict.fromkeys(call for record in records for call in record.series)
    names = ", ".join(record.name for record in records)
    missing = dict.fromkeys(
        f"{record.name}: {text}" if len(records) > 1 else text
        for record in records
        for text in record.failures
    )
    parts = {
        "TITLE": escape(f"shoal bench: {names}"),
        "STYLE": _file("style.css"),
        "RUNS": "".join(map(_run, records)),
        "CALLS": "".join(_call(call, records) for call in calls),
        "MISSING": _missing(list(missing)),
    }
    return _MARK.sub(lambda mark: parts[mark[1]], _file("page.html"))


def _file(name: str) -> str:
    return (resources.files("shoal.bench.report") / "assets" / name).read_text(encoding="utf-8")


def _run(record: BenchRecord) -> str:
    facts = [(escape(name), escape(value)) for name, value in record.run.items() if value]
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    return f"<section class=run><h2>{escape(record.name)}</h2><dl>{rows}</dl></section>\n"


def _call(call: CallName, records: Sequence[BenchRecord]) -> str:
    pictures = "".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f"{svg_of(chart, escape(f'{chart.title}: {call.title}'))}</figure>\n"
        for chart in charts_of(call, records)
    )
    return (
        f"<section class=call><h2>{escape(call.title)}</h2>\n"
        f"<div class=charts>\n{pictures}</div>\n{_numbers(call, records)}</section>\n"
    )


def _numbers(call: CallName, records: Sequence[BenchRecord]) -> str:
    first = ["run"] * (len(records) > 1)
    head = "".join(f"<th>{escape(name)}</th>" for name in (*first, *_COLUMNS))
    body = "".join(
        f"<tr class={'wrong' if point.n_wrong else 'right'}>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for point, cells in _rows(call, records)
    )
    return (
        "<details><summary>Numbers</summary><div class=wide><table>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div></details>\n"
    )


def _rows(call: CallName, records: Sequence[BenchRecord]) -> Iterator[tuple[Measured, list[str]]]:
    every = [
        (point.size, number, library, point)
        for number, record in enumerate(records)
        for library, points in record.series.get(call, {}).items()
        for point in points
    ]
    for size, number, library, point in sorted(every, key=lambda row: row[:2]):
        record = records[number]
        name = [record.name] * (len(records) > 1)
        yield (
            point,
            [
                *name,
                show_bytes(size),
                library,
                *(show_us(us) for us in (point.p50_us, point.p95_us, point.p99_us)),
                show_rate(point.bus_bytes_per_s),
                "" if point.share is None else f"{point.share:.0%}",
                f"{point.ratio:.2f}x" if point.ratio and is_comparable(point) else "",
                show_us(point.cpu_us),
                "" if point.sent_bytes is None else show_bytes(point.sent_bytes),
                "not checked" if point.n_wrong is None else str(point.n_wrong),
            ],
        )


def _missing(failures: Sequence[str]) -> str:
    if not failures:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in failures)
    return f"<section><h2>Not measured</h2><ul>{items}</ul></section>"
