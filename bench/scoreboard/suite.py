"""A run over the tables, with their goals; printed, and logged if asked."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.scoreboard.benchmark import Result, Section, run_section, summary_of
from bench.scoreboard.head import head_of
from bench.scoreboard.pools import BenchOptions, WorkerPools
from bench.scoreboard.progress import Progress
from bench.scoreboard.sections import SECTIONS
from bench.scoreboard.table import label_of, render
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.machine import render_run
from shoal.errors import UsageError

if TYPE_CHECKING:
    import argparse


Draw = Callable[[Section, str, Mapping[str, Any]], None]


def run_suite(
    args: argparse.Namespace,
    command: Sequence[str],
    draw: Draw = lambda _section, _text, _data: None,
) -> int:
    """Measure, print and write by the options.

    Args:
        command: the command line, for the head of the results.
        draw: called with each complete table: text with the head of the run, and data.

    Returns: the exit code: 0, also if goals are missed; 1 if a library computed a wrong sum, or a
    table failed, after which the others are measured.

    Raises:
        UsageError: no such table or collective.
    """
    _check(args)
    chosen = chosen_of(args)
    run = head_of(command)
    head = text = _emit(render_run(run))
    tables: list[tuple[Section, list[Result]]] = []
    start_s, broken = time.monotonic(), False
    answer_s = max(one.answer_s for one in chosen)
    with WorkerPools(_settings(args, answer_s)) as pools, Progress(sys.stderr) as progress:
        for section in chosen:
            try:
                rows = run_section(section, pools, progress.show)
                tables.append((section, rows))
                table = render(section, rows)
                draw(section, head + table, _as_data(run, tables[-1:])["tables"][section.name])
            except Exception as error:  # noqa: BLE001 - keep tables that may have taken hours
                traceback.print_exc()
                pools.clear()
                table, broken = f"# no {section.name}: {type(error).__name__}: {error}\n", True
            progress.clear()
            text += _emit("\n" + table)
    text += _emit(f"\n# {summary_of(tables)}; {time.monotonic() - start_s:.0f} s\n")
    if args.log:
        _append(Path(args.log), run["date"], text)
    if args.json:
        args.json.write_text(json.dumps(_as_data(run, tables), indent=1) + "\n")
    return int(broken or "WRONG RESULT" in text)


def chosen_of(args: argparse.Namespace) -> list[Section]:
    """Return the tables and rows that the options ask for.

    Raises:
        UsageError: there are none.
    """
    asked = [one for one in SECTIONS if not args.only or {one.name, one.part_of} & {*args.only}]
    chosen = [one for one in (_reduced(one, args) for one in asked) if one.cases]
    if not chosen:
        labels = "; ".join(dict.fromkeys(label_of(case) for one in asked for case in one.cases))
        raise UsageError(f"no row is left by these options; the tables' rows are {labels}")
    return chosen


def _check(args: argparse.Namespace) -> None:
    sections = dict.fromkeys(name for one in SECTIONS for name in (one.part_of, one.name) if name)
    part = getattr(args, "part", "")
    if part:
        sections = {name: None for name in sections if name.startswith(part)}
        args.only = [
            name if name.startswith(part) else f"{part}-{name}" for name in args.only or [part]
        ]
    for flag, names, known in (
        ("--only", args.only, sections),
        ("--collective", args.collective, list(COLLECTIVES)),
    ):
        for name in names or ():
            if name not in known:
                raise UsageError(f"{flag} {name}: unknown; choose from {', '.join(known)}")
    if args.rounds is not None and args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: at least one is needed")


def _reduced(section: Section, args: argparse.Namespace) -> Section:
    """Return the part of a table that the options ask for."""
    cases = tuple(
        one
        for one in section.cases
        if (not args.ranks or one.n_ranks in args.ranks)
        and (not args.hosts or one.n_hosts in args.hosts)
        and (not args.collective or one.collective in args.collective)
        and (not args.case or any(text in label_of(one) for text in args.case))
        and (not args.quick or args.case or section.in_quick(one))
    )
    benchmarks = tuple(one for one in section.benchmarks if one.label not in args.without)
    return replace(section, cases=cases, benchmarks=benchmarks)


def _settings(args: argparse.Namespace, answer_s: float) -> BenchOptions:
    quick, usual = (1, 3) if getattr(args, "part", "") else (2, 5)
    n_rounds = args.rounds or (quick if args.quick else usual)
    share, block_s = (0.4, 0.004) if args.quick else (1.0, 0.01)
    return BenchOptions(n_rounds, args.openmpi, share, block_s, answer_s)


def _emit(text: str) -> str:
    print(text, end="", flush=True)
    return text


def _append(path: Path, date: str, text: str) -> None:
    with path.open("a") as log:
        log.write(f"\n## {date}\n\n```text\n{text}```\n")


def _as_data(run: dict[str, str], tables: Sequence[tuple[Section, list[Result]]]) -> dict[str, Any]:
    return {
        "run": run,
        "tables": {
            section.name: [
                {
                    "collective": row.case.collective,
                    "n_ranks": row.case.n_ranks,
                    "n_bytes": row.case.n_bytes,
                    "n_hosts": row.case.n_hosts,
                    "n_servers": row.case.n_servers,
                    "model": row.case.model,
                    "row": label_of(row.case),
                    "note": row.note,
                    "rounds": row.values,
                    "failures": row.failures,
                    "goals": [asdict(verdict) for verdict in row.verdicts(section)],
                }
                for row in rows
            ]
            for section, rows in tables
        },
    }
