"""`shoal plan --workers 8 --model-bytes 500MB --step 300ms`: the steps of a training.

Compares the codecs of gradients, and the steps between averages.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from shoal.cli.described import cluster_of
from shoal.cli.options import naming
from shoal.cli.plan_servers import nics_of, place_workers
from shoal.errors import UsageError
from shoal.plan.cluster import Nic, Nics
from shoal.plan.quantities import bytes_in, microseconds
from shoal.plan.text import show_bytes, show_us
from shoal.plan.training import StepCost, Training, advice, cost_of_step, ways

_STEPS: Final = 10_000
_EVERY: Final = 100
_MOST_STEPS: Final = 10**12
_US_PER_HOUR: Final = 3600e6


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that `plan_training` reads."""
    add = parser.add_argument_group("a training, with --workers").add_argument
    add("--model-bytes", metavar="BYTES", help="size of all float32 gradients: compare codecs")
    add("--step", metavar="TIME", help="time of a step without averaging, such as 300ms")
    add("--steps", type=int, metavar="N", help=f"number of steps; default {_STEPS:,}")
    add("--every", type=int, metavar="H", help=f"steps between DiLoCo's averages; default {_EVERY}")


def asks_for_training(args: argparse.Namespace) -> bool:
    """Return True if the options ask for a training; UsageError if they contradict each other."""
    options = ("model_bytes", "step", "steps", "every")
    if all(getattr(args, name) is None for name in options):
        return False
    for name, needed in (
        ("model_bytes", "--model-bytes BYTES"),
        ("step", "--step TIME"),
        ("workers", "--workers N"),
    ):
        if getattr(args, name) is None:
            raise UsageError(f"the plan of a training needs {needed}")
    for name in ("size", "hosts", "ranks", "ranks_per_host", "collective", "tuning", "html"):
        if getattr(args, name) is not None:
            raise UsageError(f"the plan of a training does not use --{name.replace('_', '-')}")
    if args.wire != "identity":
        raise UsageError("the plan of a training compares all codecs; drop --wire")
    return True


def plan_training(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the plan; UsageError if an option is invalid."""
    training = _training_of(args)
    n_steps = _count("--steps", args.steps, _STEPS)
    every = _count("--every", args.every, _EVERY)
    costs = [cost_of_step(way, training) for way in ways(every)]
    n_servers = len(training.pool.servers)
    who = f"{args.workers} workers" + (f" and {n_servers} servers" if n_servers else "")
    given, shown = args.model_bytes.strip(), show_bytes(training.n_bytes)
    gradients = shown if given == shown.replace(" ", "") else f"{given} ({shown})"
    what = f"{gradients} of gradients, {show_us(training.compute_us)} of computing"
    yield f"{n_steps:,} steps of {who}: {what} in a step"
    yield from _table(costs, training, n_steps)
    advised = advice(costs, training.compute_us)
    yield from textwrap.wrap(advised, 98, break_long_words=False)


def _training_of(args: argparse.Namespace) -> Training:
    n_servers, n_local = args.servers or 0, place_workers(args)
    if n_local > 1 and n_servers:
        raise UsageError(
            "the plan of a training with servers has one worker on each host; drop --servers or "
            "--workers-per-host"
        )
    n_bytes = bytes_in("--model-bytes", args.model_bytes)
    with naming("--step"):
        compute_us = microseconds(args.step)
    if n_bytes < 4 or compute_us <= 0:
        raise UsageError(
            f"--model-bytes {args.model_bytes} --step {args.step}: give at least 4 bytes, and a "
            "time above 0"
        )
    cluster = cluster_of(args)
    servers = nics_of(args.server_link, n_servers, Nic.of(cluster.wire))
    return Training(n_bytes, compute_us, cluster, Nics(servers))


def _table(costs: Sequence[StepCost], training: Training, n_steps: int) -> Iterator[str]:
    width = max(len(cost.way.name) for cost in costs)
    heads = ("sent a step", "averaging", "step", "computing", "hours", "sent in all")
    yield f"  {'':{width}}" + "".join(f"  {head:>11}" for head in heads)
    for cost in costs:
        cells = (
            *(show_bytes(cost.sent_bytes), show_us(cost.averaging_us), show_us(cost.step_us)),
            f"{training.compute_us / cost.step_us:.1%}",
            _hours(n_steps * cost.step_us),
            show_bytes(n_steps * cost.sent_bytes),
        )
        below = "  below computing" if cost.averaging_us < training.compute_us else ""
        yield f"  {cost.way.name:{width}}" + "".join(f"  {cell:>11}" for cell in cells) + below


def _hours(us: float) -> str:
    hours = us / _US_PER_HOUR
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"


def _count(option: str, given: int | None, default: int) -> int:
    n = default if given is None else given
    if not 1 <= n <= _MOST_STEPS:
        raise UsageError(f"{option} {n}: must be 1 to {_MOST_STEPS}")
    return n
