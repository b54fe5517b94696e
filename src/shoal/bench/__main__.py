"""`python -m shoal.bench`: measure, print the tables, and write them down if asked to."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal.bench.benchmark import Result, Section, run_section, summary_of
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.machine import describe_run, render_run
from shoal.bench.sections import SECTIONS
from shoal.bench.table import render
from shoal.bench.worker_pools import BenchOptions, WorkerPools


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, also if goals are missed; 1 if a library computed a wrong sum."""
    args = _parser().parse_args(argv)
    chosen = [_reduced(one, args) for one in SECTIONS if not args.only or one.name in args.only]
    run = describe_run(argv)
    text = _emit(render_run(run))
    tables: list[tuple[Section, list[Result]]] = []
    start_s = time.monotonic()
    with WorkerPools(_settings(args)) as pools:
        for section in chosen:
            rows = run_section(section, pools, _progress)
            tables.append((section, rows))
            text += _emit("\n" + render(section, rows))
    text += _emit(f"\n# {summary_of(tables)}; {time.monotonic() - start_s:.0f} s\n")
    if args.log:
        _append(Path(args.log), run["date"], text)
    if args.json:
        Path(args.json).write_text(json.dumps(_as_data(run, tables), indent=1) + "\n")
    return int("WRONG RESULT" in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench", description=__doc__)
    add = parser.add_argument
    names = [section.name for section in SECTIONS]
    add("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    add("--ranks", type=int, action="append", metavar="N", help="only rows of N ranks")
    add("--hosts", type=int, action="append", metavar="N", help="only rows of N hosts; 0: no lab")
    add("--collective", action="append", choices=list(COLLECTIVES), metavar="NAME", help="only its")
    add("--without", action="append", default=[], metavar="COLUMN", help="such as openmpi")
    add("--quick", action="store_true", help="few rounds: for a first look, not for a claim")
    add("--rounds", type=int, metavar="N", help="rounds per row; default 5, with --quick 2")
    add("--json", "-J", metavar="FILE", help="write every round's value")
    add("--log", nargs="?", const="bench/LOG.md", metavar="FILE", help="append the tables")
    add("--openmpi", type=Path, default=Path(".venv-openmpi"), help="the environment it is in")
    return parser


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
    return BenchOptions(
        n_rounds, args.openmpi.absolute(), *((0.4, 0.004) if args.quick else (1.0, 0.01))
    )


def _emit(text: str) -> str:
    print(text, end="", flush=True)
    return text


def _progress(what: str) -> None:
    print(f"# progress {what}", file=sys.stderr, flush=True)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
