"""`shoal dump`: who waits for whom, from the states that the ranks of a job wrote down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.state.culprit import read, verdict
from shoal.state.text import text_of

if TYPE_CHECKING:
    from shoal.cli.options import Subparsers

_DESCRIPTION: Final = """
Read the JSON files that ranks wrote when a deadline passed, a signal came (SHOAL_DUMP_SIGNAL), or
the program called shoal.dump(path); give as many ranks as there are; the .txt file beside each is
passed over. Says which rank lacks a call that others wait in, which called something else, and for
whom all wait.
"""


def add_to(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        *("dump",), help="say who holds up a job that hung", description=_DESCRIPTION
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--text", action="store_true", help="print each file in words as well")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, judge, print."""
    states = read([file for file in args.files if not _is_beside_json(file, args.files)])
    try:
        if args.text:
            for state in states:
                sys.stdout.write(text_of(state) + "\n")
        sys.stdout.write(verdict(states))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a file is damaged: {type(error).__name__} {error}") from None
    return 0


def _is_beside_json(file: Path, files: Sequence[Path]) -> bool:
    """Whether it is the readable text that was written with another of these files."""
    return file.suffix == ".txt" and file.with_suffix(".json") in files
