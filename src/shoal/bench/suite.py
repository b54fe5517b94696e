"""`shoal bench suite`: the project's own tables, with their goals; printed, and logged if asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.benchmark import Result, Section, run_section, summary_of
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.machine import describe_run, render_run
from shoal.bench.mpi_launch import MPIS
from shoal.bench.progress import Progress
from shoal.bench.sections import SECTIONS
from shoal.bench.table import render
from shoal.bench.worker_pools import BenchOptions, WorkerPools
from shoal.errors import UsageError

if TYPE_CHECKING:
    import argparse


def run_suite(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print and write, as the options of `shoal bench suite` say.

    Returns: the exit code: 0, also if goals are missed; 1 if a library computed a wrong sum.

    Raises:
        UsageError: no such table or collective.
    """
    _check(args)
    chosen = [_reduced(one, args) for one in SECTIONS if not args.only or one.name in args.only]
    run = describe_run(argv)
    text = _emit(render_run(run))
    tables: list[tuple[Section, list[Result]]] = []
    start_s = time.monotonic()
    with WorkerPools(_settings(args)) as pools, Progress(sys.stderr) as progress:
        for section in chosen:
            rows = run_section(section, pools, progress.say)
            progress.clear()
            tables.append((section, rows))
            text += _emit("\n" + render(section, rows))
    text += _emit(f"\n# {summary_of(tables)}; {time.monotonic() - start_s:.0f} s\n")
    if args.log:
        _append(Path(args.log), run["date"], text)
    if args.json:
        args.json.write_text(json.dumps(_as_data(run, tables), indent=1) + "\n")
    return int("WRONG RESULT" in text)


def _check(args: argparse.Namespace) -> None:
    sections = [section.name for section in SECTIONS]
    for flag, names, known in (
        ("--only", args.only, sections),
        ("--collective", args.collective, list(COLLECTIVES)),
    ):
        for name in names or ():
            if name not in known:
                raise UsageError(f"{flag} {name}: there are {', '.join(known)}")
    if args.rounds is not None and args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: at least one is needed")


def _reduced(section: Section, args: argparse.Namespace) -> Section:
    """What is left of a table by the options."""
    cases = tuple(
        one
        for one in section.cases
        if (not args.ranks or one.n_ranks in args.ranks)
        and (not args.hosts or one.n_hosts in args.hosts)
        and (not args.collective or one.collective in args.collective)
        and (not args.quick or section.in_quick(one))
    )
    benchmarks = tuple(one for one in section.benchmarks if one.label not in args.without)
    return replace(section, cases=cases, benchmarks=benchmarks)


def _settings(args: argparse.Namespace) -> BenchOptions:
    n_rounds = args.rounds or (2 if args.quick else 5)
    mpi = {name: getattr(args, name) for name in MPIS}
    return BenchOptions(n_rounds, mpi, *((0.4, 0.004) if args.quick else (1.0, 0.01)))


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
