"""`shoal trace`: what every rank holds, round by round."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Final

from shoal.cli.options import Subparsers, add_team, team_of, write
from shoal.errors import UsageError
from shoal.lens.trace import trace
from shoal.lens.trace_page import json_of, page_of, require_playable
from shoal.lens.trace_text import text_of

_WIDTH: Final = 120
"""Columns where the terminal's are not known."""
_NARROWEST: Final = 40
"""Columns that the shortest table needs."""


def add_to(subparsers: Subparsers) -> None:
    """Add `shoal trace`."""
    what = "what every rank holds, round by round"
    parser = subparsers.add_parser("trace", help=what, description=f"Show {what}.")
    add = parser.add_argument
    add("algorithm", help="such as ring, tree or sharded/ring")
    add("--collective", default="all_reduce", metavar="NAME", help="default all_reduce")
    add_team(parser)
    output = parser.add_mutually_exclusive_group().add_argument
    output("--html", type=Path, metavar="FILE", help="write a page to play it, one file for itself")
    output("--json", action="store_true", help="print everything, for programs")
    add("--width", type=int, metavar="N", help="columns of the text; default the terminal's")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    team = team_of(args)
    terminal = shutil.get_terminal_size((_WIDTH, 0)).columns
    width = terminal if args.width is None else args.width
    if width < _NARROWEST:
        raise UsageError(f"--width {width}: at least {_NARROWEST} columns are needed")
    if args.html:
        require_playable(team.size)
    traced = trace(args.collective, args.algorithm, team.size, root=team.root, hosts=team.hosts)
    if args.html:
        write(page_of(traced), args.html)
    elif args.json:
        write(json_of(traced) + "\n", None)
    else:
        for line in text_of(traced, width):
            print(line)
    return 0
