"""Estimate the time and the bytes of training steps, by codec and frequency of averages.

Pure: the same cluster and the same model give the same estimate. docs/planner.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import CODECS, Codec, top_k
from shoal.plan.choose import choose, narrowed
from shoal.plan.cost import cost_of
from shoal.plan.defaults import encoding_us_per_byte
from shoal.plan.fusion import CALL_US, choose_fusion
from shoal.plan.planner import Planner
from shoal.plan.served import choose_with_servers, competing, cost_with_servers
from shoal.plan.shares import loads
from shoal.plan.text import show_us
from shoal.schedule import find
from shoal.schedule.counts import count

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster, Nics

FORWARD: Final = 1 / 3
"""The part of a step's computing in which no gradient is ready: a backward pass takes twice as long
as a forward pass."""

HIDDEN: Final = 0.05
"""Communication that adds less than this part to a step counts as hidden."""


class Way(NamedTuple):
    """A way to average.

    Args:
        name: the option as programs write it.
        codec: the encoding of elements between hosts.
        feeds_back: ranks add the errors of rounding to the next step.
        every: the steps between two averages; above 1, models are averaged, not gradients.
    """

    name: str
    codec: Codec
    feeds_back: bool = False
    every: int = 1


class Training(NamedTuple):
    """A model and its cluster; each worker has its own host if `pool` has servers.

    `n_bytes` is all gradients in float32, `compute_us` a step in which nothing is averaged.
    """

    n_bytes: int
    compute_us: float
    cluster: Cluster
    pool: Nics


class StepCost(NamedTuple):
    """The mean step of a training, and the bytes that each worker sends to other hosts.

    `averaging_us` is the time of the averages without simultaneous computing.
    """

    way: Way
    averaging_us: float
    step_us: float
    sent_bytes: float


def ways(every: int) -> list[Way]:
    """Return the ways to compare; the last ones average models once in `every` steps."""
    codecs = list(CODECS.values())
    found = [
        Way(f'ErrorFeedback("{codec}")', codec, feeds_back=True)
        if codec.block > 1
        else Way(codec.name if codec.is_narrow else "float32", codec)
        for codec in codecs
    ]
    found += [
        Way(f"ChunkTopK(0.01, {bits})", top_k(0.01, bits), feeds_back=True) for bits in (8, 2)
    ]
    found.append(Way(f"DiLoCo, H = {every}", Codec.IDENTITY, every=every))
    least = min(codecs, key=lambda codec: codec.bits)
    found.append(Way(f"DiLoCo, H = {every}, {least}", least, every=every))
    return found


def cost_of_step(way: Way, training: Training) -> StepCost:
    """Return the cost of a mean step.

    Gradients become ready evenly during the backward pass and are sent in fusion buffers of equal
    length, in turn. Models are averaged in the same buffers after a step, without overlap.
    """
    total, cluster, pool = training.n_bytes, training.cluster, training.pool
    fusion = choose_fusion(total, Planner(cluster), has_servers=bool(pool.servers)).n_bytes
    n_buffers = max(1, -(-total // fusion))
    call = _call(-(-total // n_buffers), cluster, pool, way.codec)
    drain_us = call.alone_us - call.busy_us
    averaging_us = n_buffers * call.busy_us + drain_us
    sent = n_buffers * call.sent_bytes / way.every
    if way.every > 1:
        averaging_us /= way.every
        return StepCost(way, averaging_us, training.compute_us + averaging_us, sent)
    forward_us = FORWARD * training.compute_us
    backward_us = training.compute_us - forward_us + n_buffers * CALL_US
    if way.feeds_back:
        # Two passes over memory, and an encoding and a decoding.
        us_per_byte = 2 * (cluster.memory_us_per_byte + encoding_us_per_byte(way.codec))
        backward_us += total * us_per_byte
    first_us = backward_us / n_buffers  # until the first buffer is full
    last_us = max(first_us + n_buffers * call.busy_us, backward_us + call.busy_us) + drain_us
    return StepCost(way, averaging_us, forward_us + last_us, sent)


class _Call(NamedTuple):
    """The cost of one all-reduce; see `cost.Cost`."""

    busy_us: float
    alone_us: float
    sent_bytes: float


def _call(n_bytes: int, cluster: Cluster, pool: Nics, codec: Codec) -> _Call:
    if cluster.size == 1:
        return _Call(0.0, 0.0, 0.0)
    weights = choose_with_servers(n_bytes, cluster, pool, codec).weights
    if weights is not None:
        cost = cost_with_servers(weights, n_bytes, cluster, pool, codec)
        times, sent = competing(weights), max(loads(weights)[: cluster.size]) * n_bytes
        return _Call(times * cost.busy_us, times * cost.alone_us, sent * codec.share)
    forced = "sharded" if pool.servers and cluster.n_hosts == cluster.size else ""
    name = choose("all_reduce", n_bytes, cluster, forced, codec=codec).name
    cost = cost_of("all_reduce", name, n_bytes, narrowed(cluster, codec))
    counts = count(find("all_reduce", name).fitted(n_bytes, cluster.size), cluster.hosts)
    n_local = cluster.size // cluster.n_hosts
    sent = max(host.sent for host in counts.hosts) * n_bytes / counts.n_chunks / n_local
    return _Call(cost.busy_us, cost.alone_us, sent * codec.share)


def advice(costs: Sequence[StepCost], compute_us: float) -> str:
    """Return the recommended way and the reason; `costs` has float32 first, then falling bytes."""
    wide, *others = costs
    exposed_us = wide.step_us - compute_us
    if exposed_us <= HIDDEN * compute_us:
        return (
            f"do not compress: averaging float32 takes {show_us(wide.averaging_us)} and adds only "
            f"{show_us(exposed_us)} to {show_us(compute_us)} of computing, all that compression "
            "could save; every codec rounds gradients for that"
        )
    why = f"float32 adds {show_us(exposed_us)} to {show_us(compute_us)} of computing"
    each_step = [cost for cost in others if cost.way.every == 1]
    for cost in each_step:
        left_us = cost.step_us - compute_us
        if left_us <= HIDDEN * compute_us:
            return f"{cost.way.name} is enough: {why}, and it adds {show_us(left_us)}"
    best = min(each_step, key=lambda cost: cost.step_us)
    seldom = min(others, key=lambda cost: cost.step_us)
    if seldom.way.every == 1 or best.step_us <= wide.step_us * (1 + HIDDEN) <= seldom.step_us:
        return (
            f"{best.way.name} is fastest: {why}, and it adds {show_us(best.step_us - compute_us)}"
        )
    return (
        f"no average of gradients is hidden: {why}, and {best.way.name} adds "
        f"{show_us(best.step_us - compute_us)}; {seldom.way.name} computes "
        f"{compute_us / seldom.step_us:.1%} of the time, but trains another way"
    )
