"""`shoal draw`: who sends to whom, as SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.options import Subparsers, add_team, team_of, write
from shoal.lens.draw import draw, require_drawable
from shoal.lens.trace import trace


def add_to(subparsers: Subparsers) -> None:
    """Add `shoal draw`."""
    parser = subparsers.add_parser(
        "draw",
        help="who sends to whom, as SVG",
        description="Draw who sends to whom, as SVG.",
    )
    add = parser.add_argument
    add("algorithm", help="such as ring, tree or sharded/ring")
    add("--collective", default="all_reduce", metavar="NAME", help="default all_reduce")
    add_team(parser)
    add("--out", type=Path, metavar="FILE", help="default the standard output")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    team = team_of(args)
    require_drawable(team.size)
    traced = trace(args.collective, args.algorithm, team.size, root=team.root, hosts=team.hosts)
    write(draw(traced), args.out)
    return 0
