"""A cluster described by options: --hosts 8 --ranks-per-host 4 --link 25Gb."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from shoal.cli.options import hosts_of, naming
from shoal.errors import UsageError
from shoal.plan.defaults import default_cluster
from shoal.plan.text import counted
from shoal.plan.wire import link_of

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that `cluster_of` reads."""
    add = parser.add_argument_group("the cluster").add_argument
    add("--hosts", metavar="N", help="number of hosts, or the ranks of each: 2x4 or 4,4,2")
    add("--ranks", help=argparse.SUPPRESS)  # other commands have it: explain what to use here
    add("--ranks-per-host", type=int, metavar="N", help="ranks on each; default 1")
    add("--cores", type=int, metavar="N", help="CPU cores per host; default: one per rank")
    link = "rate of a NIC each way, or rate, latency and CPU time per message: "
    link += "25Gb,20us,5us; default 10Gb,30us,5us"
    add("--link", default="10Gb", metavar="LINK", help=link)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe; UsageError if they are invalid."""
    if args.ranks is not None or args.hosts is None:
        raise UsageError(
            "describe the cluster: --hosts 8 --ranks-per-host 4 --link 25Gb, or --hosts 1 "
            "--ranks-per-host 8 for one host of 8 ranks"
        )
    text = args.hosts
    if text.isdecimal():
        each = 1 if args.ranks_per_host is None else args.ranks_per_host
        if int(text[:9]) < 1 or each < 1:  # Python refuses to read thousands of digits
            raise UsageError(f"--hosts {text}, --ranks-per-host {each}: both must be at least 1")
        text += f"x{each}"
    elif args.ranks_per_host is not None:
        raise UsageError(f"--hosts {text} already gives the ranks; drop --ranks-per-host")
    hosts = hosts_of(text)
    n_cores = max(Counter(hosts).values()) if args.cores is None else args.cores
    if n_cores < 1:
        raise UsageError(f"--cores must be at least 1, got {n_cores}")
    with naming("--link"):
        wire = link_of(args.link)
    return default_cluster(hosts, n_cores=n_cores, wire=wire)


def cluster_text(cluster: Cluster) -> str:
    """Return the numbers of ranks and hosts as text."""
    return f"{counted(cluster.size, 'rank')} on {counted(cluster.n_hosts, 'host')}"
