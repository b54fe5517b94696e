"""`shoal tune`: measure the algorithms on this cluster.

Measure the links between the hosts of this job, and the time of every promising algorithm, by
collective and size. With SHOAL_TUNING=FILE later jobs choose algorithms by these times.

Start it the way you start the job, under torchrun, mpirun or srun.
"""

from __future__ import annotations

import argparse
import array
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import check_writable
from shoal.errors import UsageError
from shoal.plan.choose import choose
from shoal.plan.quantities import bytes_in
from shoal.plan.text import show_bytes, show_us
from shoal.plan.wire import link_text
from shoal.tune.measure import MEASURED, measure_group

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster
    from shoal.plan.tuning import Tuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal tune`."""
    add, only = parser.add_argument, "measure only this collective; may be repeated"
    out = "file for the measurements; default %(default)s"
    add("--out", type=Path, default=Path("shoal-tuning.jsonl"), metavar="FILE", help=out)
    add("--collective", action="append", choices=MEASURED, help=only)
    add("--links", action="store_true", help="measure only the links; takes a second")
    add("--from", dest="least", default="4B", metavar="N", help="smallest size; default 4B")
    add("--to", dest="most", default="64MiB", metavar="N", help="largest size; default 64MiB")
    add("--rounds", type=int, default=5, metavar="N", help="samples of each time; default 5")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    sizes = sizes_between(bytes_in("--from", args.least), bytes_in("--to", args.most))
    if args.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {args.rounds}")
    import shoal

    # Measure without earlier choices, and without a narrow encoding.
    for name in ("SHOAL_ALGO", "SHOAL_TUNING", "SHOAL_LINK", "SHOAL_WIRE"):
        os.environ.pop(name, None)
    with shoal.init() as group:
        if args.links and group.planner.cluster.n_hosts == 1:
            raise UsageError("--links: all ranks share one host, so there is no link to measure")
        if group.rank == 0:
            check_writable(args.out)
        collectives = () if args.links else args.collective or MEASURED

        def progress(what: str) -> None:
            if group.rank == 0:
                print(f"shoal tune: {what}", file=sys.stderr)

        tuning = measure_group(group, collectives, sizes, args.rounds, _allocate, progress)
        if group.rank == 0:
            tuning.write(args.out)
            print(f"{table(tuning, group.planner.cluster)}wrote {args.out}")
    return 0


def sizes_between(least: int, most: int) -> list[int]:
    """Return the sizes 4 B, 16 B, ... 4 GiB between two sizes; UsageError if there is none."""
    sizes = [4 << 2 * power for power in range(16) if least <= 4 << 2 * power <= most]
    if not sizes:
        raise UsageError(
            f"--from {show_bytes(least)} --to {show_bytes(most)}: the range contains no size of "
            "4 B, 16 B, 64 B, ... 4 GiB"
        )
    return sizes


def table(tuning: Tuning, cluster: Cluster) -> str:
    """Return the measured times as text, compared with the model's choices."""
    lines, ratios = [], []
    if tuning.link is not None:
        cluster = replace(cluster, wire=tuning.link)
        lines.append(f"links between hosts: as with SHOAL_LINK={link_text(tuning.link)}")
    for collective, by_size in tuning.times.items():
        lines.append(collective)
        for n_bytes, times in by_size.items():
            best = min(times, key=times.__getitem__)
            chosen = choose(collective, n_bytes, cluster).name
            ratios.append(times[chosen] / times[best])
            each = ", ".join(
                f"{name} {show_us(us)}" for name, us in sorted(times.items(), key=lambda t: t[1])
            )
            lines.append(f"  {show_bytes(n_bytes):>8}  model {chosen} {ratios[-1]:.2f}  {each}")
    n_good = sum(ratio <= 1.1 for ratio in ratios)
    if ratios:
        good = f"{n_good} of {len(ratios)}"
        lines.append(f"the model's choice is within 10 % of the fastest at {good}")
    return "".join(f"{line}\n" for line in lines)


def _allocate(n_bytes: int) -> object:
    from shoal.group.buffers import span_of

    return span_of(array.array("f", bytes(n_bytes)))
