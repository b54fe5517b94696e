"""`shoal dump`: name the ranks that hold up a job that hangs.

Read the JSON files that ranks wrote at a deadline, at a signal (SHOAL_DUMP_SIGNAL), or when the
program called shoal.dump(path). Give the files of as many ranks as possible; the .txt file
beside each is skipped. The output names the ranks that have not made a call in which others wait,
the ranks that made a different call, and the ranks for which all others wait.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shoal.errors import UsageError
from shoal.state.culprit import read, verdict
from shoal.state.text import text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal dump`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a rank's JSON file")
    parser.add_argument("--text", action="store_true", help="also print each file as text")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # `shoal dump folder/*` also names the readable text beside each JSON file.
    beside = {file.with_suffix(".txt") for file in args.files if file.suffix == ".json"}
    states = read([file for file in args.files if file not in beside])
    try:
        if args.text:
            for state in states:
                sys.stdout.write(text_of(state) + "\n")
        sys.stdout.write(verdict(states))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"a file is damaged: {type(error).__name__} {error}") from None
    return 0
