"""`shoal plan`: show the algorithms of a described cluster by size, or the gain of servers.

Show the algorithm of each collective on a described cluster, by size, and the reason; with
--workers and --servers, the time of an all-reduce by the number of reduction servers.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from shoal.cli.described import add_cluster, cluster_of
from shoal.cli.plan_servers import add_servers, asks_for_servers, plan_servers
from shoal.codec import Codec, parse_wire
from shoal.errors import UsageError
from shoal.plan.channels import choose_channels
from shoal.plan.planner import Planner
from shoal.plan.quantities import show_bytes, show_us
from shoal.plan.settings import forced_from
from shoal.plan.tuning import read_tuning
from shoal.schedule import COLLECTIVES

_SIZES: Final = tuple(1 << power for power in range(2, 29))
_MOST_RANKS: Final = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal plan`."""
    add, known = parser.add_argument, sorted(COLLECTIVES)
    add("--collective", action="append", choices=known, metavar="NAME", help="only this")
    add("--tuning", type=Path, metavar="FILE", help="choose by what `shoal tune` measured")
    add("--wire", default="identity", metavar="CODEC", help="bf16: float32 sums between hosts")
    add_cluster(parser)
    add_servers(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if asks_for_servers(args):
        print("\n".join(plan_servers(args)))
        return 0
    cluster = cluster_of(args)
    if cluster.size > _MOST_RANKS:
        raise UsageError(f"a plan is for at most {_MOST_RANKS} ranks, not {cluster.size}")
    tuning = read_tuning(args.tuning) if args.tuning else None
    if tuning and (difference := tuning.differs_from(cluster.hosts, cluster.n_cores)):
        raise UsageError(f"the tuning file {args.tuning} is of another cluster: {difference}")
    planner, codec = Planner(cluster, forced_from(), tuning), parse_wire(args.wire)
    for collective in args.collective or COLLECTIVES:
        narrow = codec if COLLECTIVES[collective].narrows else Codec.IDENTITY
        print("\n".join(_table(collective, planner, narrow)))
    if cluster.n_hosts > 1:
        channels = choose_channels(cluster)
        what = f"{channels.n} channel{'s' * (channels.n > 1)} between hosts, since {channels.why}"
        print(textwrap.fill(what, 98, break_long_words=False))
    return 0


def _table(collective: str, planner: Planner, codec: Codec) -> Iterator[str]:
    """One line per range of sizes with the same algorithm, and the reason at its upper end."""
    yield collective if not codec.is_narrow else f"{collective}, in {codec} between hosts"
    choices = [
        (n_bytes, planner.choose(collective, n_bytes, codec=codec))
        for n_bytes in _sizes(collective)
    ]
    for place, (n_bytes, choice) in enumerate(choices):
        is_last = place + 1 == len(choices)
        if is_last or choices[place + 1][1].name != choice.name:
            upto = "and more" if is_last and len(choices) > 1 else f"to {show_bytes(n_bytes)}"
            yield f"  {upto:<12} {choice.name:<18} {show_us(choice.cost_us):>8}"
            yield textwrap.indent(textwrap.fill(choice.why, 92, break_long_words=False), " " * 6)


def _sizes(collective: str) -> Sequence[int]:
    return _SIZES if COLLECTIVES[collective].carries else _SIZES[:1]
