"""`shoal report`: draw the results of shoal bench.

Draw the results of `shoal bench --json FILE` by size: time, bus bandwidth, and shoal beside its
peers, with the network's limit. Several files, such as before and after, share the pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from shoal.cli.options import write
from shoal.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal report`."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a file of shoal bench --json")
    default, page = "shoal-report.html", "the page; default %(default)s"
    add("-o", "--out", type=Path, default=Path(default), metavar="FILE", help=page)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from shoal.bench.record import read_records

    records = read_records(args.files)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("shoal report draws with matplotlib: pip install matplotlib")
    from shoal.bench.report.page import page_of

    write(page_of(records), args.out)
    return 0
