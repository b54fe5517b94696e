"""How long fusion buffers are best: gradients that are averaged while the next ones are computed.

Pure: every rank that knows the same cluster and the same model chooses the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cost import cost_of
from shoal.plan.text import show_bytes, show_us

if TYPE_CHECKING:
    from shoal.plan.planner import Planner

LEAST_FUSION_BYTES: Final = 512 << 10
"""Shorter ones hide little more: 4 hosts at 400 Mbit/s left 3.3 % exposed with 256 KiB, 4.8 with
this, 6.0 with 1 MiB, 9.0 with 2 MiB; 8 at 200 left 3.9, 3.9, 5.9 and 8.9 (docs/decisions/0034)."""

SERVED_FUSION_BYTES: Final = 2 << 20
"""The least where servers help, which they do from 1 MiB on: a larger model cut into equal buffers
of at most this has none below that."""

MOST_FUSION_BYTES: Final = 64 << 20
"""Larger ones are never full before most of a backward pass is over."""

# What a call costs the thread that computes, besides what the model knows: from Python to the wire
# and back. Measured: docs/decisions/0034.
_CALL_US: Final = 60.0


class Fusion(NamedTuple):
    """How long buffers are, and the sentence that says why."""

    n_bytes: int
    why: str


def choose_fusion(total_bytes: int, planner: Planner, *, has_servers: bool = False) -> Fusion:
    """The length of the buffers that so many bytes of gradients are cut into.

    The model is a backward pass that takes as long as averaging keeps its bottleneck busy, which is
    where overlap is worth most. Nothing can leave before the first buffer is full, and after the
    last is full it has to go its whole way alone: both take longer with long buffers. With short
    ones, messages and calls take longer.
    """
    least = SERVED_FUSION_BYTES if has_servers else LEAST_FUSION_BYTES
    lengths = _lengths(total_bytes, least)
    taken = {n_bytes: _taken(total_bytes, n_bytes, planner) for n_bytes in lengths}
    least_us = min(busy_us for busy_us, _ in taken.values())
    exposed = {n_bytes: busy + rest - least_us for n_bytes, (busy, rest) in taken.items()}
    first, *others = sorted(exposed, key=lambda n_bytes: exposed[n_bytes])
    why = (
        f"{show_bytes(total_bytes)} in buffers of {show_bytes(first)} leave "
        f"{show_us(exposed[first])} exposed"
    )
    for other in others[:2]:
        why += f", of {show_bytes(other)} {show_us(exposed[other])}"
    return Fusion(first, why)


def _lengths(total_bytes: int, least: int) -> list[int]:
    """What is compared: powers of two, up to the one that holds everything."""
    lengths = [least]
    while lengths[-1] < min(total_bytes, MOST_FUSION_BYTES):
        lengths.append(2 * lengths[-1])
    return lengths


def _taken(total_bytes: int, fusion_bytes: int, planner: Planner) -> tuple[float, float]:
    """How long all buffers keep the bottleneck busy, and what a step takes besides, in us."""
    n_buffers = max(1, -(-total_bytes // fusion_bytes))
    n_bytes = max(1, -(-total_bytes // n_buffers))
    name = planner.choose("all_reduce", n_bytes).name
    cost = cost_of("all_reduce", name, n_bytes, planner.cluster)
    # Nothing is sent until the first buffer is full: by the model, as long as it will then be busy.
    # All are busy in turn, and the last ends `alone_us - busy_us` after it was. So `busy_us` of the
    # first and of the last cancel.
    return n_buffers * cost.busy_us, n_buffers * _CALL_US + cost.alone_us
