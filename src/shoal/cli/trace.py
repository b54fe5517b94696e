"""`shoal trace`: show the contents of every rank's buffers, round by round."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shoal.analysis.trace.page import json_of, page_of, require_playable
from shoal.analysis.trace.text import text_of
from shoal.analysis.trace.tracer import Trace, trace
from shoal.cli.options import hosts_of, write
from shoal.errors import UsageError
from shoal.schedule import find

_WIDTH: Final = 120
"""Columns if the width of the terminal is not known."""
_NARROWEST: Final = 40
"""Columns that the shortest table needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal trace`."""
    add_schedule(parser)
    output = parser.add_mutually_exclusive_group().add_argument
    output("--html", type=Path, metavar="FILE", help="write one page that plays the trace")
    output("--json", action="store_true", help="print the whole trace, for programs")
    width = "columns of the text; default the terminal's"
    parser.add_argument("--width", type=int, metavar="N", help=width)
    parser.set_defaults(run=_run)


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `trace_of` reads."""
    add = parser.add_argument
    add("algorithm", help="such as ring, tree or sharded/ring")
    add("--collective", default="all_reduce", metavar="NAME", help="default all_reduce")
    add("--ranks", type=int, metavar="N", help="number of ranks; default 4")
    add("--hosts", metavar="2x4", help="2 hosts of 4 ranks each; or 4,4,2: the ranks of each host")
    add("--root", type=int, default=0, metavar="R", help="root of the collective; default 0")


def trace_of(args: argparse.Namespace, require: Callable[[int], None] | None = None) -> Trace:
    """Return the trace that the arguments describe; UsageError if they are invalid.

    `require` raises UsageError if there are too many ranks for the output.
    """
    hosts = hosts_of(args.hosts) if args.hosts else ()
    size = len(hosts) or 4 if args.ranks is None else args.ranks
    if size < 1:
        raise UsageError(f"--ranks {size}: there must be at least one rank")
    if hosts and size != len(hosts):
        raise UsageError(f"--hosts {args.hosts} has {len(hosts)} ranks, but --ranks is {size}")
    if not 0 <= args.root < size:
        raise UsageError(f"--root {args.root} must be a rank: 0 to {size - 1}")
    if require:
        require(size)
    if args.root and not find(args.collective, args.algorithm).rooted:
        raise UsageError(f"--root {args.root}: {args.algorithm} {args.collective} has no root")
    return trace(args.collective, args.algorithm, size, root=args.root, hosts=hosts)


def _run(args: argparse.Namespace) -> int:
    terminal = shutil.get_terminal_size((_WIDTH, 0)).columns
    width = terminal if args.width is None else args.width
    if width < _NARROWEST:
        raise UsageError(f"--width {width}: at least {_NARROWEST} columns are needed")
    traced = trace_of(args, require_playable if args.html else None)
    if args.html:
        write(page_of(traced), args.html)
    elif args.json:
        write(json_of(traced) + "\n", None)
    else:
        for line in text_of(traced, width):
            print(line)
    return 0
