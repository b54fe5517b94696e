"""Choose the length of fusion buffers, which are averaged while later gradients are computed.

Pure: the same cluster and the same model give the same choice on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cost import cost_of
from shoal.plan.text import show_bytes, show_us

if TYPE_CHECKING:
    from shoal.plan.planner import Planner

LEAST_FUSION_BYTES: Final = 512 << 10
"""Shorter buffers hide little more: 4 hosts at 400 Mbit/s left 3.3 % exposed with 256 KiB, 4.8 with
this, 6.0 with 1 MiB, 9.0 with 2 MiB; 8 at 200 left 3.9, 3.9, 5.9 and 8.9 (docs/decisions/0034)."""

SERVED_FUSION_BYTES: Final = 2 << 20
"""The least with servers, which help from 1 MiB on: a larger model in equal buffers of at most this
length has no buffer below 1 MiB."""

MOST_FUSION_BYTES: Final = 64 << 20
"""Larger buffers are full only when most of a backward pass is over."""

# The time that a call takes from the computing thread, from Python to the wire and back, which the
# model does not include. Measured: docs/decisions/0034.
CALL_US: Final = 60.0


class Fusion(NamedTuple):
    """A length of buffers, and the reason for it."""

    n_bytes: int
    why: str


def choose_fusion(total_bytes: int, planner: Planner, *, has_servers: bool = False) -> Fusion:
    """Return the length of the buffers into which gradients of `total_bytes` are cut.

    The model is a backward pass as long as averaging keeps its bottleneck busy, when overlap saves
    most. Averaging begins when the first buffer is full, and the last buffer is sent after the
    pass: long buffers make both longer. Short buffers need more messages and calls.
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
    """Return the lengths to compare: powers of two, up to the first that holds all gradients."""
    lengths = [least]
    while lengths[-1] < min(total_bytes, MOST_FUSION_BYTES):
        lengths.append(2 * lengths[-1])
    return lengths


def _taken(total_bytes: int, fusion_bytes: int, planner: Planner) -> tuple[float, float]:
    """Return the bottleneck's busy time for all buffers, and the rest of a step, in us."""
    n_buffers = max(1, -(-total_bytes // fusion_bytes))
    n_bytes = max(1, -(-total_bytes // n_buffers))
    name = planner.choose("all_reduce", n_bytes).name
    cost = cost_of("all_reduce", name, n_bytes, planner.cluster)
    # By the model the first buffer fills for `busy_us`. Then the buffers are busy in turn, and the
    # last one ends `alone_us - busy_us` later. So `busy_us` of the first and of the last cancel.
    return n_buffers * cost.busy_us, n_buffers * CALL_US + cost.alone_us
