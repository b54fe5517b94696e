"""A cluster described by options: --hosts 8 --ranks-per-host 4 --link 25Gb --latency 20us."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

from shoal.cli.options import MOST_RANKS, hosts_of
from shoal.errors import UsageError
from shoal.plan.cluster import Cluster, LinkCost
from shoal.plan.defaults import CONTENTION, LOCAL
from shoal.plan.quantities import bytes_of, bytes_per_us, microseconds
from shoal.plan.wire import link_of


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that `cluster_of` reads."""
    add = parser.add_argument_group("the cluster").add_argument
    add("--hosts", metavar="N", help="number of hosts; or 2x4 or 4,4,2: their ranks")
    add("--ranks", help=argparse.SUPPRESS)  # as other commands call it, and people type it
    add("--ranks-per-host", type=int, metavar="N", help="if --hosts is a number; default 1")
    add("--cores", type=int, metavar="N", help="CPU cores per host; default: one per rank")
    link = "bandwidth of a NIC, each way; default 10Gb; or all three: 25Gb,20us,5us"
    add("--link", default="10Gb", metavar="RATE", help=link)
    add("--latency", metavar="TIME", help="one way, between hosts; default 30us")
    add("--message", metavar="TIME", help="CPU time per message, each end; default 5us")
    add("--burst", default="0", metavar="BYTES", help="bytes that an idle NIC passes at once")
    add("--memory", default="18GB", metavar="RATE", help="a core's folds and copies; default 18GB")
    add("--stack", default="5.5GB", metavar="RATE", help="a core's TCP, each end; default 5.5GB")
    fresh = "a core's first touch of memory; default 2GB"
    add("--fresh", default="2GB", metavar="RATE", help=fresh)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe; UsageError if they make no sense."""
    if args.ranks is not None or args.hosts is None:
        raise UsageError(
            "describe the cluster: --hosts 8 --ranks-per-host 4 --link 25Gb, or --hosts 1 "
            "--ranks-per-host 8 for one host of 8 ranks"
        )
    hosts = _hosts_of(args.hosts, args.ranks_per_host)
    n_cores = max(Counter(hosts).values()) if args.cores is None else args.cores
    if n_cores < 1:
        raise UsageError(f"--cores must be at least 1, got {n_cores}")
    memory = 1 / bytes_per_us(args.memory)
    return Cluster(
        hosts=hosts,
        local=LOCAL,
        wire=_link_of(args),
        memory_us_per_byte=memory,
        n_cores=n_cores,
        burst_bytes=bytes_of(args.burst),
        fresh_us_per_byte=1 / bytes_per_us(args.fresh),
        network_us_per_byte=1 / bytes_per_us(args.stack),
        contention=CONTENTION,
    )


def cluster_text(cluster: Cluster) -> str:
    """Return the numbers of ranks and hosts in words."""
    ranks = f"{cluster.size} rank{'s' * (cluster.size > 1)}"
    return f"{ranks} on {cluster.n_hosts} host{'s' * (cluster.n_hosts > 1)}"


def _link_of(args: argparse.Namespace) -> LinkCost:
    """Read --link in the syntax of `SHOAL_LINK`, or with --latency and --message."""
    link, n_given = link_of(args.link), args.link.count(",")
    for place, name in enumerate(("latency", "message")):
        text = getattr(args, name)
        if text is not None and n_given > place:
            raise UsageError(f"--link {args.link} already gives the {name}; drop --{name} {text}")
        if text is not None:
            link = replace(link, **{f"{name}_us": microseconds(text)})
    return link


def _hosts_of(text: str, ranks_per_host: int | None) -> tuple[int, ...]:
    if not text.isdecimal():
        if ranks_per_host is not None:
            raise UsageError(f"--hosts {text} already gives the ranks; drop --ranks-per-host")
        return hosts_of(text)
    n_ranks = 1 if ranks_per_host is None else ranks_per_host
    if int(text) < 1 or n_ranks < 1:
        raise UsageError(f"{text} hosts of {n_ranks} ranks: there must be at least one of each")
    if int(text) * n_ranks > MOST_RANKS:
        raise UsageError(f"{text} hosts of {n_ranks} ranks have more than {MOST_RANKS} ranks")
    return tuple(rank // n_ranks for rank in range(int(text) * n_ranks))
