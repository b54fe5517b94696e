"""`python -m bench.scoreboard`: measure the tables, or compare the simulator with the engine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.scoreboard.simulated import run_simulated
from bench.scoreboard.suite import run_suite
from shoal.cli.options import Parser
from shoal.errors import ShoalError, UsageError
from shoal.plan.quantities import mbit_in

_PROGRAM: Final = "python -m bench.scoreboard"


def main(words: Sequence[str]) -> int:
    """Run with these arguments; return the exit code, as `shoal` does."""
    part, rest = (words[0], words[1:]) if words[:1] and words[0] in _PARTS else ("", words)
    try:
        return _PARTS[part]([*_PROGRAM.split(), *words], rest)
    except ShoalError as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2


def _run_suite(command: Sequence[str], words: Sequence[str]) -> int:
    parser = Parser(
        prog=_PROGRAM,
        description="Measure the project's own tables, with their goals; see docs/bench.md. "
        "`training` or `simulated` as the first argument measures something else.",
    )
    _add_options(parser)
    return run_suite(parser.parse_args(words), command)


def _run_training(command: Sequence[str], words: Sequence[str]) -> int:
    parser = Parser(
        prog=f"{_PROGRAM} training",
        description="Measure trainings by torch's DistributedDataParallel and shoal's, on one host "
        "and on the hosts of labs (root); see bench/training.md.",
    )
    _add_options(parser)
    what = "write each table and its picture there (needs matplotlib)"
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help=what)
    parser.set_defaults(part="training")  # fewer rounds: its steps are long
    args = parser.parse_args(words)
    if args.out is None:
        return run_suite(args, command)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("pictures are drawn with matplotlib: pip install matplotlib")
    from bench.scoreboard.pictures import draw_table

    args.out.mkdir(parents=True, exist_ok=True)
    return run_suite(args, command, lambda *table: draw_table(args.out, *table))


def _run_simulated(command: Sequence[str], words: Sequence[str]) -> int:
    parser = Parser(
        prog=f"{_PROGRAM} simulated",
        description="Compare the simulator with the engine, on the hosts of labs; needs root.",
    )
    add = parser.add_argument
    add("--hosts", type=int, action="append", metavar="N", help="hosts; default 4 and 8")
    add("--rate", action="append", metavar="RATE", help="NICs' rate; default 200mbit and 1gbit")
    add("--rounds", type=int, default=5, metavar="N", help="rounds per lab; default 5")
    args = parser.parse_args(words)
    rates_mbit = [mbit_in("--rate", text) for text in args.rate or ("200mbit", "1gbit")]
    shaped = [rate for rate in rates_mbit if rate is not None]
    if len(shaped) < len(rates_mbit) or args.rounds < 1:
        raise UsageError("the simulator needs NICs with a rate, and at least one round")
    return run_simulated(args.hosts or (4, 8), shaped, args.rounds, command)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", action="append", metavar="NAME", help="only this table; may be repeated")
    add("--ranks", type=int, action="append", metavar="N", help="only rows of N ranks")
    add("--hosts", type=int, action="append", metavar="N", help="only rows of N hosts; 0: no lab")
    add("--collective", action="append", metavar="NAME", help="only this collective's rows")
    drop = "leave out a column, such as openmpi"
    add("--without", action="append", default=[], metavar="COLUMN", help=drop)
    named = "only rows whose name contains TEXT, such as 8+4 or 100 MiB"
    add("--case", action="append", metavar="TEXT", help=named)
    add("--quick", action="store_true", help="few rounds: for a first look, not for a claim")
    add("--rounds", type=int, metavar="N", help="rounds per row; default 5, with --quick 2")
    add("-J", "--json", type=Path, metavar="FILE", help="write the values of all rounds")
    add("--log", nargs="?", const="bench/LOG.md", metavar="FILE", help="append the tables")
    where = "the environment with Open MPI; default %(default)s"
    add("--openmpi", type=Path, default=Path(".venv-openmpi"), metavar="DIR", help=where)


_PARTS: Final[Mapping[str, Callable[[Sequence[str], Sequence[str]], int]]] = {
    "": _run_suite,
    "training": _run_training,
    "simulated": _run_simulated,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
