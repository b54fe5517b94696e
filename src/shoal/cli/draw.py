"""`shoal draw`: draw the messages between ranks as SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.analysis.draw.drawing import draw, require_drawable
from shoal.cli.options import write
from shoal.cli.trace import add_schedule, trace_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal draw`."""
    add_schedule(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the SVG; default standard output")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    write(draw(trace_of(args, require_drawable)), args.out)
    return 0
