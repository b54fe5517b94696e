"""The command `shoal`: parse, call, print. One module for each subcommand.

A subcommand is a module whose docstring is its help, with `add_arguments(parser)`, which also sets
the parser's default `run`: a function of the parsed arguments that returns the exit code.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import shoal
from shoal.cli.options import Parser
from shoal.errors import ShoalError

__all__ = ["main"]

COMMANDS: Final = (
    *("check", "trace", "draw", "simulate", "plan", "tune", "bench", "report", "dump"),
    *("top", "lab", "server", "status"),
)
"""The subcommands, each a module of this package. A name here is the whole registration."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shoal` with these arguments, or with the arguments of the process.

    Returns: the exit code. 0: success. 1: the command found a fault, or the output could not be
        written. 2: a ShoalError, also for wrong arguments; one line on stderr gives the reason.
        130: interrupted. `shoal lab run` and `exec` return the code of their command.
    """
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    try:
        words = sys.argv[1:] if argv is None else argv
        args = _parser(words[:1]).parse_args(words)
        args.words = list(words)
        code: int = args.run(args)
        sys.stdout.flush()
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        is_full = error.errno in _FULL
        if not is_full and not isinstance(error, BrokenPipeError):
            raise
        # Such as `shoal trace ring | head`. Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:
            print(f"shoal: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _parser(first: Sequence[str]) -> Parser:
    """Build the parser of the subcommand named by the first word, or of all subcommands.

    Without the other subcommands' imports a restarted server serves 0.1 s sooner.
    """
    parser = Parser(prog="shoal", description=shoal.__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name in [name for name in COMMANDS if name in first] or COMMANDS:
        module = import_module(f"shoal.cli.{name}")
        summary, _, more = (module.__doc__ or "").partition("\n\n")
        what = summary.partition(": ")[2].removesuffix(".")
        description = more or f"{what[0].upper()}{what[1:]}."
        module.add_arguments(subparsers.add_parser(name, help=what, description=description))
    return parser
