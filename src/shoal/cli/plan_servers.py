"""`shoal plan --workers 8 --servers 4`: estimates the gain from reduction servers."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from shoal.cli.described import cluster_of
from shoal.cli.options import naming
from shoal.codec import Codec, parse_wire
from shoal.dtypes import DType
from shoal.errors import UsageError
from shoal.group.pool.rails import rail_of
from shoal.plan.cluster import Cluster, Nic, Nics
from shoal.plan.cost import cost_of
from shoal.plan.quantities import bytes_in, bytes_per_us
from shoal.plan.served import Served, choose_with_servers
from shoal.plan.text import show_bytes, show_us
from shoal.schedule.weights import MOST_REDUCERS

_COUNT: Final = re.compile(r"\d{1,4}", re.ASCII)
_ALL_UPTO: Final = 12


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options that `plan_servers` reads."""
    add = parser.add_argument_group("reduction servers").add_argument
    add("--workers", type=int, metavar="N", help="total number of workers")
    add("--workers-per-host", type=int, metavar="L", help="workers on each host; default 1")
    add("--servers", type=int, metavar="K", help="estimate the gain of up to this many servers")
    add("--server-link", metavar="RATES", help="10Gb, or 2x10Gb,2x5Gb; default as --link")
    add("--size", metavar="BYTES", help="size of the tensor; default 100MiB")


def asks_for_servers(args: argparse.Namespace) -> bool:
    """Return True if the options request servers; UsageError if they contradict each other."""
    options = ("server_link", "size", "workers_per_host")
    given = [name for name in options if getattr(args, name) is not None]
    if args.workers is None and args.servers is None and not given:
        return False
    if args.workers is None:
        raise UsageError("a plan with servers needs --workers N --servers K; add --workers N")
    if args.servers is None:
        raise UsageError(
            "--workers needs --servers K, to plan reduction servers, or --model-bytes BYTES --step "
            "TIME, to plan a training"
        )
    for name in ("hosts", "ranks", "ranks_per_host"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--workers and --workers-per-host already give the hosts; drop {_option(name)}"
            )
    if args.html:
        raise UsageError("--html shows algorithms, not servers; drop it, or --workers")
    for name in ("collective", "tuning"):
        if getattr(args, name):
            raise UsageError(
                f"servers share in all_reduce only, by the model; drop {_option(name)}"
            )
    return True


def plan_servers(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the plan; UsageError if an option is invalid."""
    n_local = place_workers(args)
    cluster, n_bytes = cluster_of(args), bytes_in("--size", args.size or "100MiB")
    if n_bytes < 1:
        raise UsageError(f"--size {args.size}: must be above 0")
    codec = parse_wire(args.wire)
    pool = Nics(nics_of(args.server_link, args.servers, Nic.of(cluster.wire)))
    numbers = _numbers(args.servers)
    rows = [
        _served(n_bytes, cluster, replace(pool, servers=pool.servers[:n]), codec) for n in numbers
    ]
    narrow = "" if not codec.is_narrow else f" in {codec}"
    who = f"{args.workers} workers" + (f" on {cluster.n_hosts} hosts" if n_local > 1 else "")
    yield f"all_reduce of {show_bytes(n_bytes)}{narrow}, {who}, by servers"
    yield from _table(rows, numbers)
    yield from textwrap.wrap(rows[-1].why, 98, break_long_words=False)


def place_workers(args: argparse.Namespace) -> int:
    """Set the options that describe the workers' hosts; return the number of workers on each.

    Raises UsageError for invalid numbers of workers and servers.
    """
    n_workers = args.workers
    if n_workers == 1:
        raise UsageError("--workers 1: one worker has nothing to reduce; pass 2 or more")
    for what, n, least in (("--workers", n_workers, 2), ("--servers", args.servers or 0, 0)):
        if not least <= n <= MOST_REDUCERS:
            raise UsageError(f"{what} {n}: must be {least} to {MOST_REDUCERS}")
    n_local: int = 1 if args.workers_per_host is None else args.workers_per_host
    if not 1 <= n_local < n_workers or n_workers % n_local:
        fitting = [str(n) for n in range(1, n_workers) if n_workers % n == 0]
        raise UsageError(
            f"--workers {n_workers} --workers-per-host {n_local}: servers need equally many "
            f"workers on each of several hosts; pass --workers-per-host {' or '.join(fitting)}"
        )
    args.hosts, args.ranks_per_host = str(n_workers // n_local), n_local
    return n_local


def _served(n_bytes: int, cluster: Cluster, pool: Nics, codec: Codec) -> Served:
    """Choose as workers do: if several share a host, each rail chooses for its part.

    The work inside hosts for one piece is not hidden behind the network (decision 31).
    """
    rail = rail_of(cluster.hosts, 0)
    if rail is None or rail.n_rails == 1 or not pool.servers:
        return choose_with_servers(n_bytes, cluster, pool, codec)
    n = rail.n_rails
    pieces = rail.pieces(DType.UINT8, n_bytes)
    if not pieces:
        return choose_with_servers(n_bytes, cluster, replace(pool, servers=()), codec)
    nics = tuple(Nic(nic.out / n, nic.into / n) for nic in pool.servers)
    found = choose_with_servers(-(-n_bytes // n), rail.cluster_of(cluster), Nics(nics), codec)
    inside = replace(cluster, hosts=(0,) * n)
    inside_us = cost_of("all_reduce", "sharded", pieces[0].n_elems, inside).cost_us
    not_by, by = "not by servers, since ", f"along each of {n} rails "
    is_not = found.why.startswith(not_by)
    why = f"{not_by}{by}{found.why[len(not_by) :]}" if is_not else f"{by}{found.why}"
    return found._replace(
        cost_us=found.cost_us + inside_us,
        alone_us=found.alone_us + inside_us,
        why=f"{why}; {show_us(inside_us)} more pass inside hosts",
    )


def _table(rows: Sequence[Served], numbers: Sequence[int]) -> Iterator[str]:
    yield f"  {'servers':>7}  {'time':>8}  {'speed':>6}  bottleneck"
    for row, n in zip(rows, numbers, strict=True):
        cells = f"  {n:>7}  {show_us(row.cost_us):>8}  {rows[0].cost_us / row.cost_us:>5.2f}x"
        yield f"{cells}  {row.bottleneck if row.weights or not n else 'unused'}".rstrip()


def nics_of(text: str | None, n_servers: int, link: Nic) -> tuple[Nic, ...]:
    """Return the servers' NICs from --server-link, by default `link`; UsageError if wrong."""
    if text is None:
        return (link,) * n_servers
    groups = [part.rpartition("x") for part in text.split(",")]
    if len(groups) == 1 and not groups[0][1]:
        groups = [(str(n_servers), "x", text)]
    if wrong := [count for count, x, _ in groups if x and not _COUNT.fullmatch(count)]:
        raise UsageError(f"--server-link {text}: {wrong[0]!r} is not a number of servers")
    with naming("--server-link"):
        rates = [(int(count or 1), bytes_per_us(rate)) for count, _, rate in groups]
    n_named = sum(count for count, _ in rates)
    if n_named != n_servers:
        raise UsageError(f"--server-link {text} names {n_named} servers, --servers {n_servers}")
    return tuple(Nic(rate, rate) for count, rate in rates for _ in range(count))


def _numbers(most: int) -> list[int]:
    """Return the numbers of servers to compare: all to `most`, or 0, powers of two and `most`."""
    if most <= _ALL_UPTO:
        return list(range(most + 1))
    return [0, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
