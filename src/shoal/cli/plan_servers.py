"""`shoal plan --workers 8 --servers 4`: what reduction servers would gain, and whether they pay."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from shoal.cli.described import cluster_of
from shoal.codec import Codec, parse_wire
from shoal.errors import UsageError
from shoal.plan.cluster import Nic, Pool
from shoal.plan.quantities import bytes_of, bytes_per_us, microseconds, show_bytes, show_us
from shoal.plan.served import Served, choose_with_servers
from shoal.schedule.weights import MOST_REDUCERS

_COUNT: Final = re.compile(r"\d{1,4}", re.ASCII)
_ALL_UPTO: Final = 12
_STEPS: Final = 1000  # that costs are told for
_US_PER_HOUR: Final = 3600e6


class _Prices(NamedTuple):
    """Of an hour of one machine, in any money; and what a step takes besides the all-reduce."""

    worker: float
    server: float
    compute_us: float

    def of(self, served: Served, n_workers: int, n_servers: int) -> float:
        """What `_STEPS` steps cost."""
        machines = n_workers * self.worker + n_servers * self.server
        return _STEPS * (served.cost_us + self.compute_us) / _US_PER_HOUR * machines


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options that `plan_servers` reads."""
    add = parser.add_argument_group("reduction servers").add_argument
    add("--workers", type=int, metavar="N", help="so many workers, each on a host of its own")
    add("--servers", type=int, metavar="K", help="tell what up to so many servers would gain them")
    add("--server-link", metavar="RATES", help="10Gb, or 2x10Gb,2x5Gb; default: as --link")
    add("--size", metavar="BYTES", help="of the tensor; default 100MiB")
    add("--worker-price", metavar="X", help="of an hour of one worker, in any money")
    add("--server-price", metavar="Y", help="of an hour of one server")
    add("--compute", metavar="TIME", help="what a step takes besides the all-reduce; default 0s")


def asks_for_servers(args: argparse.Namespace) -> bool:
    """Whether it is servers that a plan is asked for.

    Raises:
        UsageError: options of theirs are there without `--workers` and `--servers`, or they are
            there with others that say something else.
    """
    options = ("server_link", "size", "worker_price", "server_price", "compute")
    given = [name for name in options if getattr(args, name) is not None]
    if args.workers is None and args.servers is None:
        if given:
            raise UsageError(f"{_option(given[0])} is for --workers N --servers K; add both")
        return False
    if args.workers is None or args.servers is None:
        missing = "--workers N" if args.workers is None else "--servers K"
        raise UsageError(f"what servers would gain needs --workers and --servers; add {missing}")
    for name, default in (("hosts", "1"), ("ranks_per_host", None)):
        if getattr(args, name) != default:
            raise UsageError(
                f"--workers says how many hosts there are, one worker on each; leave out "
                f"{_option(name)}. Servers serve no workers that share a host yet"
            )
    for name in ("collective", "tuning"):
        if getattr(args, name):
            raise UsageError(
                f"servers share in all_reduce, by the model; leave out {_option(name)}"
            )
    return True


def plan_servers(args: argparse.Namespace) -> Iterator[str]:
    """The lines of the plan.

    Raises:
        UsageError: the options say what cannot be.
    """
    if args.workers == 1:
        raise UsageError("--workers 1: one worker has nothing to reduce; name 2 or more")
    for what, n, least in (("--workers", args.workers, 2), ("--servers", args.servers, 0)):
        if not least <= n <= MOST_REDUCERS:
            raise UsageError(f"{what} {n}: must be {least} to {MOST_REDUCERS}")
    args.hosts = str(args.workers)
    cluster, n_bytes = cluster_of(args), bytes_of(args.size or "100MiB")
    if n_bytes < 1:
        raise UsageError(f"--size {args.size}: a tensor of no bytes gains nothing")
    codec, prices = parse_wire(args.wire), _prices_of(args)
    pool = Pool(_nics_of(args.server_link, args.servers, Nic.of(cluster.wire)))
    numbers = _numbers(args.servers)
    rows = [
        choose_with_servers(n_bytes, cluster, replace(pool, servers=pool.servers[:n]), codec)
        for n in numbers
    ]
    narrow = "" if codec is Codec.IDENTITY else f" in {codec}"
    yield f"all_reduce of {show_bytes(n_bytes)}{narrow}, {args.workers} workers, by servers"
    yield from _table(rows, numbers, args.workers, prices)
    yield from textwrap.wrap(rows[-1].why, 98, break_long_words=False)
    if prices:
        costs = [prices.of(row, args.workers, n) for row, n in zip(rows, numbers, strict=True)]
        yield from textwrap.wrap(_whether_they_pay(costs, numbers), 98, break_long_words=False)


def _table(
    rows: Sequence[Served], numbers: Sequence[int], n_workers: int, prices: _Prices | None
) -> Iterator[str]:
    cost = f"  {_STEPS} steps" if prices else ""
    yield f"  {'servers':>7}  {'time':>8}  {'speed':>6}{cost}  bottleneck"
    for row, n in zip(rows, numbers, strict=True):
        cells = f"  {n:>7}  {show_us(row.cost_us):>8}  {row.alone_us / row.cost_us:>5.2f}x"
        if prices:
            cells += f"  {_money(prices.of(row, n_workers, n)):>10}"
        yield f"{cells}  {row.bottleneck if row.weights or not n else 'unused'}".rstrip()


def _whether_they_pay(costs: Sequence[float], numbers: Sequence[int]) -> str:
    best = min(range(len(costs)), key=costs.__getitem__)
    if not best:
        return f"servers do not pay: {_STEPS} steps cost least without, {_money(costs[0])}"
    saved = f"{_money(costs[best])} instead of {_money(costs[0])} for {_STEPS} steps"
    return f"servers pay: {numbers[best]} of them cost least, {saved}"


def _prices_of(args: argparse.Namespace) -> _Prices | None:
    texts = {"--worker-price": args.worker_price, "--server-price": args.server_price}
    if not any(texts.values()):
        if args.compute:
            raise UsageError("--compute only tells costs; add --worker-price and --server-price")
        return None
    prices = []
    for option, text in texts.items():
        if text is None:
            raise UsageError(f"whether servers pay needs both prices; add {option}")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            raise UsageError(f"{option} {text}: a price is a number of 0 or more")
        prices.append(price)
    return _Prices(prices[0], prices[1], microseconds(args.compute or "0s"))


def _nics_of(text: str | None, n_servers: int, link: Nic) -> tuple[Nic, ...]:
    if text is None:
        return (link,) * n_servers
    groups = [part.rpartition("x") for part in text.split(",")]
    if len(groups) == 1 and not groups[0][1]:
        groups = [(str(n_servers), "x", text)]
    if wrong := [count for count, x, _ in groups if x and not _COUNT.fullmatch(count)]:
        raise UsageError(f"--server-link {text}: {wrong[0]!r} is no number of servers")
    rates = [(int(count or 1), bytes_per_us(rate)) for count, _, rate in groups]
    n_named = sum(count for count, _ in rates)
    if n_named != n_servers:
        raise UsageError(f"--server-link {text} names {n_named} servers, --servers {n_servers}")
    return tuple(Nic(rate, rate) for count, rate in rates for _ in range(count))


def _numbers(most: int) -> list[int]:
    """None to all; of many, none and powers of two and all."""
    if most <= _ALL_UPTO:
        return list(range(most + 1))
    return [0, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]


def _money(cost: float) -> str:
    return f"{cost:.2f}" if cost >= 10 else f"{cost:.3g}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
