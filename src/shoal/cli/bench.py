"""`shoal bench`: measure collectives of shoal and of other libraries.

Time collectives by size, check every result, and print a table like nccl-tests; --peers measures
other libraries in the same run, in turn. The command starts ranks on this host (--ranks N) or on
the hosts of a lab of network namespaces (--hosts N, needs root). Under torchrun, mpirun or srun it
uses the ranks that they start. docs/bench.md explains the numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.cli.options import MOST_TIMEOUT_S, check_writable
from shoal.errors import UsageError, did_you_mean
from shoal.rendezvous.environment import find_place

if TYPE_CHECKING:
    from shoal.bench.sweep import BenchPlace, Sweep

_LAUNCHED: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MOST_RANKS: Final = 1000  # on a host
_DEFAULT_RATE: Final = "1gbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal bench`."""
    _add_calls(parser)
    _add_numbers(parser)
    _add_ranks(parser)
    parser.set_defaults(run=_run)


def _add_calls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "collectives", nargs="*", metavar="COLLECTIVE", help="a name, or all; default all_reduce"
    )
    add = parser.add_argument_group("calls, as in nccl-tests").add_argument
    add("-b", "--minbytes", default="32M", metavar="N", help="smallest size; default 32M")
    add("-e", "--maxbytes", default="32M", metavar="N", help="largest size; default 32M")
    add("-i", "--stepbytes", default="1M", metavar="N", help="step between sizes; default 1M")
    add("-f", "--stepfactor", type=int, default=1, metavar="N", help="factor, instead of a step")
    ops = "sum, prod, min, max or avg, several with commas, or all; default sum"
    add("-o", "--op", default="sum", metavar="OP", help=ops)
    types = "such as float or half, several with commas, or all; default float"
    add("-d", "--datatype", default="float", metavar="TYPE", help=types)
    add("-r", "--root", default="0", metavar="RANK", help="a rank or all; default 0")


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("repetitions and output").add_argument
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls; default 20")
    add("-w", "--warmup_iters", type=int, default=5, metavar="N", help="untimed calls; default 5")
    add("-c", "--check", type=int, default=1, metavar="N", help="checked calls; default 1")
    row = "1: a barrier before each call; default 0: calls in a row"
    add("-z", "--blocking", type=int, default=0, choices=(0, 1), help=row)
    add("--rounds", type=int, default=5, metavar="N", help="turns of each library; default 5")
    add("-J", "--json", type=Path, metavar="FILE", help="write all results, for `shoal report`")
    turn = "limit of one turn's calls; default 120"
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help=turn)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add("--ranks", type=int, metavar="N", help="start N ranks on this host; default 2")
    add("--hosts", type=int, metavar="N", help="start ranks on N hosts of a lab (needs root)")
    add("--ranks-per-host", type=int, metavar="N", help="ranks on each host of the lab; default 1")
    add("--rate", metavar="RATE", help="the lab's NICs: 400mbit, 25Gb or none; default 1gbit")
    interface = "interface to shoal; default torch if it is installed"
    add("--through", choices=("torch", "numpy"), help=interface)
    add("--peers", default="", metavar="NAMES", help="libraries to measure beside shoal: gloo")


def _run(args: argparse.Namespace) -> int:
    _require_numpy()
    from shoal.bench.perf import run_sweep

    sweep = sweep_of(args)
    is_first = not sweep.place.is_joined or find_place().rank == 0
    if args.json and is_first:
        check_writable(args.json)
    if not sweep.place.is_joined:
        return run_sweep(sweep, args.words[1:], args.json)
    from shoal.bench.joined import JoinedRanks

    with JoinedRanks(sweep.answer_s) as joined:
        return run_sweep(sweep, args.words[1:], args.json, joined.ask, is_first)


def _require_numpy() -> None:
    if importlib.util.find_spec("numpy") is None:
        raise UsageError("shoal bench needs NumPy to check results: pip install numpy")


def sweep_of(args: argparse.Namespace) -> Sweep:
    """Return the run that the options describe; UsageError if they are invalid."""
    from shoal.bench.elements import elements_of, operations_of
    from shoal.bench.sweep import PEERS, SizeRange, Sweep
    from shoal.plan.quantities import bytes_in

    for flag, number, least in (
        ("-n", args.iters, 1),
        ("-w", args.warmup_iters, 0),
        ("-c", args.check, 0),
        ("--rounds", args.rounds, 1),
    ):
        if number < least:
            raise UsageError(f"{flag} {number}: at least {least}")
    if not 0 < args.timeout <= MOST_TIMEOUT_S:
        raise UsageError(
            f"--timeout {args.timeout:g}: must be above 0, and at most {MOST_TIMEOUT_S} seconds"
        )
    peers = [name for name in args.peers.split(",") if name]
    for name in peers:
        if name not in PEERS:
            raise UsageError(f"--peers {name}: no such library; known are {', '.join(PEERS)}")
    sizes = {"-b": args.minbytes, "-e": args.maxbytes, "-i": args.stepbytes}
    least, most, step = (bytes_in(flag, text) for flag, text in sizes.items())
    has_torch = importlib.util.find_spec("torch") is not None
    return Sweep(
        place=_place_of(args),
        collectives=_collectives_of(args.collectives),
        sizes=SizeRange(least, most, step, args.stepfactor),
        elements=elements_of(args.datatype),
        operations=operations_of(args.op),
        roots=[_root_of(args.root)],
        n_calls=args.iters,
        n_warmup=args.warmup_iters,
        n_checks=args.check,
        is_apart=bool(args.blocking),
        n_rounds=min(args.rounds, args.iters),
        library="shoal" if (args.through or ("torch" * has_torch)) == "torch" else "group",
        peers=list(dict.fromkeys(peers)),
        answer_s=args.timeout,
    )


def _collectives_of(names: Sequence[str]) -> Sequence[str]:
    from shoal.bench.collectives import COLLECTIVES

    for name in names:
        if name not in COLLECTIVES and name != "all":
            near = did_you_mean(name, COLLECTIVES)
            raise UsageError(
                f"no collective {name!r}: there are {', '.join(COLLECTIVES)}, all{near}"
            )
    return list(COLLECTIVES) if "all" in names else list(dict.fromkeys(names)) or ["all_reduce"]


def _root_of(text: str) -> int:
    from shoal.bench.sweep import ALL_RANKS

    if text != "all" and not (text.isdecimal() and len(text) < 10):
        raise UsageError(f"-r {text}: a rank or all")
    return ALL_RANKS if text == "all" else int(text)


def _place_of(args: argparse.Namespace) -> BenchPlace:
    from shoal.bench.sweep import BenchPlace
    from shoal.plan.quantities import mbit_in

    is_launched = any(os.environ.get(name) for name in _LAUNCHED)
    if is_launched and (args.ranks is not None or args.hosts is not None):
        raise UsageError("a launcher has started these ranks: leave out --ranks and --hosts")
    if args.ranks is not None and args.hosts is not None:
        raise UsageError("--ranks starts ranks on this host, --hosts on a lab: pass only one")
    if args.hosts is None and (args.rate is not None or args.ranks_per_host is not None):
        raise UsageError("--rate and --ranks-per-host are for the hosts of a lab: add --hosts N")
    if is_launched:
        return BenchPlace(find_place().size, is_joined=True)
    for flag, n in (("--ranks", args.ranks), ("--ranks-per-host", args.ranks_per_host)):
        if n is not None and not 1 <= n <= _MOST_RANKS:
            raise UsageError(f"{flag} {n}: expected 1 to {_MOST_RANKS}")
    if args.hosts is not None and args.hosts < 2:
        raise UsageError(f"--hosts {args.hosts}: expected 2 or more; --ranks measures one host")
    if args.hosts is None:
        return BenchPlace(2 if args.ranks is None else args.ranks)
    rate_mbit = mbit_in("--rate", args.rate or _DEFAULT_RATE)
    return BenchPlace(args.hosts * (args.ranks_per_host or 1), args.hosts, rate_mbit)
