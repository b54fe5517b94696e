"""`shoal plan`: show the algorithms for a described cluster, or the gain of servers or codecs.

Show the algorithm of each collective on a described cluster, by size, and the reason. With
--workers and --servers, show the time of an all-reduce with each number of reduction servers. With
--workers, --model-bytes and --step, show the hours and bytes of a training for each codec.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from shoal.analysis import charts
from shoal.cli.described import add_cluster, cluster_of, cluster_text
from shoal.cli.options import write
from shoal.cli.plan_servers import add_servers, asks_for_servers, plan_servers
from shoal.cli.plan_training import add_training, asks_for_training, plan_training
from shoal.codec import CODECS, Codec, parse_wire
from shoal.errors import UsageError
from shoal.plan.channels import choose_channels
from shoal.plan.choose import costs_of, narrowed
from shoal.plan.planner import Planner
from shoal.plan.settings import forced_from
from shoal.plan.text import show_bytes, show_us
from shoal.plan.tuning import read_tuning
from shoal.schedule import COLLECTIVES

_SIZES: Final = tuple(1 << power for power in range(2, 29))
_EVERY: Final = 4  # a page shows every fourth of these sizes
_MOST_RANKS: Final = 1 << 16
_WIRES: Final = f"codec of float32 between hosts: {', '.join(CODECS)}"
_ABOUT: Final = (
    "The time of each algorithm by the planner's model; the coloured one is chosen. Bars longer "
    "than ten times the shortest are cut."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal plan`."""
    add, known = parser.add_argument, sorted(COLLECTIVES)
    add("--collective", action="append", choices=known, metavar="NAME", help="only this collective")
    add("--tuning", type=Path, metavar="FILE", help="choose by times that `shoal tune` wrote")
    add("--wire", default="identity", metavar="CODEC", help=_WIRES)
    add("--html", type=Path, metavar="FILE", help="write a page with bars by algorithm and size")
    add_cluster(parser)
    add_servers(parser)
    add_training(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if asks_for_training(args):
        print("\n".join(plan_training(args)))
        return 0
    if asks_for_servers(args):
        print("\n".join(plan_servers(args)))
        return 0
    cluster = cluster_of(args)
    if cluster.size > _MOST_RANKS:
        raise UsageError(f"a plan is for at most {_MOST_RANKS} ranks, not {cluster.size}")
    tuning = read_tuning(args.tuning) if args.tuning else None
    if tuning and (difference := tuning.differs_from(cluster.hosts, cluster.n_cores)):
        raise UsageError(f"the tuning file {args.tuning} is for another cluster: {difference}")
    planner, codec = Planner(cluster, forced_from(), tuning), parse_wire(args.wire)
    if args.html:
        write(_page(args.collective or COLLECTIVES, planner, codec), args.html)
        return 0
    for collective in args.collective or COLLECTIVES:
        print("\n".join(_table(collective, planner, _codec_of(collective, codec))))
    if cluster.n_hosts > 1:
        channels = choose_channels(cluster)
        what = f"{channels.n} channel{'s' * (channels.n > 1)} between hosts, since {channels.why}"
        print(textwrap.fill(what, 98, break_long_words=False))
    return 0


def _table(collective: str, planner: Planner, codec: Codec) -> Iterator[str]:
    """Yield a line per range of sizes with the same algorithm, and the reason at its upper end."""
    yield _title(collective, codec)
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


def _codec_of(collective: str, codec: Codec) -> Codec:
    return codec if COLLECTIVES[collective].narrows else Codec.IDENTITY


def _title(collective: str, codec: Codec) -> str:
    return f"{collective}, in {codec} between hosts" if codec.is_narrow else collective


def _page(collectives: Iterable[str], planner: Planner, codec: Codec) -> str:
    """Return a page: for each collective, the times of the algorithms at some sizes."""
    sections = []
    for collective in collectives:
        figures, narrow = [], _codec_of(collective, codec)
        cluster = narrowed(planner.cluster, narrow)
        for n_bytes in _sizes(collective)[::_EVERY]:
            choice = planner.choose(collective, n_bytes, codec=narrow)
            costs, _ = costs_of(collective, n_bytes, cluster, uneven=False, codec=narrow)
            times_us = {name: cost.cost_us for name, cost in costs.items()}
            times_us[choice.name] = choice.cost_us
            title = show_bytes(n_bytes) if COLLECTIVES[collective].carries else "any size"
            figures.append(charts.bars(title, times_us, choice.name, choice.why))
        sections.append(charts.section(_title(collective, narrow), "", figures))
    return charts.page_of(f"shoal plan: {cluster_text(planner.cluster)}", _ABOUT, sections)


def _sizes(collective: str) -> Sequence[int]:
    return _SIZES if COLLECTIVES[collective].carries else _SIZES[:1]
