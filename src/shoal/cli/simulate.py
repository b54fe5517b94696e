"""`shoal simulate`: estimate the time of an algorithm on a described cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.analysis import charts
from shoal.analysis.simulate.simulator import simulate
from shoal.cli.described import add_cluster, cluster_of, cluster_text
from shoal.cli.options import write
from shoal.errors import UsageError, did_you_mean
from shoal.plan.choose import candidates
from shoal.plan.quantities import bytes_in
from shoal.plan.text import show_bytes, show_us
from shoal.schedule import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.analysis.simulate.simulator import Simulation
    from shoal.plan.cluster import Cluster

_MOST_RANKS = 32_768  # a ring of this size takes half a minute and two gigabytes
_ABOUT = (
    "Each NIC out of a host and into it, over time. A NIC out is idle until its host's cores have "
    "the next segment ready. Colours show what that segment waited for last: data or a grant from "
    "another host; since then, the cores of its own host."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal simulate`."""
    add = parser.add_argument
    add("algorithm", nargs="?", help="such as ring, tree or sharded/ring")
    add("--all", action="store_true", help="compare all algorithms that the planner considers")
    add("--collective", default="all_reduce", metavar="NAME", help="default all_reduce")
    size = "size of the tensor, or of one rank's block; default 100MiB, for a barrier 1B"
    add("--bytes", metavar="N", help=size)
    add("--root", type=int, default=0, metavar="R", help="root of the collective; default 0")
    page = "write a page with the NICs over time; with --all, bars by algorithm too"
    add("--html", type=Path, metavar="FILE", help=page)
    add_cluster(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.all == bool(args.algorithm):
        raise UsageError("name one algorithm, or pass --all; see shoal simulate --help")
    row = COLLECTIVES.get(args.collective)
    default = "100MiB" if row is None or row.carries else "1B"
    cluster, n_bytes = cluster_of(args), bytes_in("--bytes", args.bytes or default)
    if not 0 <= args.root < cluster.size:
        raise UsageError(f"--root {args.root} must be a rank: 0 to {cluster.size - 1}")
    if cluster.size > _MOST_RANKS:
        raise UsageError(f"{cluster.size} ranks: at most {_MOST_RANKS} are simulated")
    if args.html and cluster.n_hosts == 1:
        raise UsageError("--html shows the NICs of hosts: describe two or more")
    if args.all and args.collective not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        near = did_you_mean(args.collective, COLLECTIVES)
        raise UsageError(f"no collective {args.collective!r} to compare: there are {known}{near}")
    names = [args.algorithm]
    if args.all:
        names = candidates(args.collective, n_bytes, cluster)
    how = {"root": args.root, "records": bool(args.html)}
    every = {name: simulate(args.collective, name, cluster, n_bytes, **how) for name in names}
    if args.html:
        write(_page(args.collective, cluster, n_bytes, every), args.html)
    else:
        _print(args.collective, cluster, n_bytes, every)
    return 0


def _notes(cluster: Cluster, n_bytes: int, played: Simulation) -> list[str]:
    notes = []
    if played.n_simulated < cluster.size:
        n, size = played.n_simulated, cluster.size
        notes.append(f"{n} of {size} ranks are simulated; the others have equal steps")
    if played.timeline and played.timeline.time_us < played.time_us:
        notes.append(f"the first {show_us(played.timeline.time_us)} are simulated and shown")
    if played.n_bytes not in (n_bytes, n_bytes * cluster.size):
        notes.append(f"the time is of {show_bytes(played.n_bytes)}, so that all chunks are equal")
    return notes


def _print(
    collective: str, cluster: Cluster, n_bytes: int, played: Mapping[str, Simulation]
) -> None:
    """Print a row for each algorithm, the fastest first; for a single algorithm also notes."""
    print(f"{collective} of {show_bytes(n_bytes)}, {cluster_text(cluster)}")
    print(f"{'algorithm':>16}  {'time':>10}  {'bandwidth':>11}  {'rounds':>6}  busiest")
    for name, one in sorted(played.items(), key=lambda item: item[1].time_us):
        share = one.busy_us / one.time_us if one.time_us else 0.0
        rate = f"{show_bytes(one.n_bytes / one.time_us * 1e6)}/s" if one.time_us else "-"
        row = f"{name:>16}  {show_us(one.time_us):>10}  {rate:>11}  {one.rounds:>6}"
        print(f"{row}  {one.busiest}, {share:.0%} of the time")
        if len(played) == 1:
            print("".join(f"note: {note}\n" for note in _notes(cluster, n_bytes, one)), end="")


def _page(collective: str, cluster: Cluster, n_bytes: int, played: dict[str, Simulation]) -> str:
    """Return a page: bars if there are several algorithms, then each one's NICs, fastest first."""
    times_us = {name: one.time_us for name, one in played.items()}
    ordered = sorted(times_us, key=times_us.__getitem__)
    sections = [charts.legend()]
    if len(played) > 1:
        bars = charts.bars("by algorithm", times_us, ordered[0])
        sections.append(charts.section("Time", "", [bars]))
    for name in ordered:
        one = played[name]
        notes = [f"{show_us(one.time_us)}, {one.rounds} rounds", *_notes(cluster, n_bytes, one)]
        figures = charts.timelines(one.timeline) if one.timeline else []
        sections.append(charts.section(name, "; ".join(notes), figures))
    title = f"shoal simulate: {collective} of {show_bytes(n_bytes)}, {cluster_text(cluster)}"
    return charts.page_of(title, _ABOUT, sections)
