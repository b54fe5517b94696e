"""Weights of reducers, and the names of all-reduces that are sharded by them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from shoal.errors import UsageError

# Peers send names too, so sizes are bounded before any memory is taken for them.
MOST_REDUCERS: Final = 4096
"""The most workers, and the most servers, in a name."""
MOST_WEIGHT: Final = 1 << 20
"""The largest weight: shares finer than a millionth are lost in whole cache lines."""
MOST_NAME_BYTES: Final = 4096

PARTS: Final = ("servers", "workers")
"""The parts of two calls that share a buffer: the chunks that servers or workers reduce."""

_RUN: Final = r"(?:[1-9]\d{0,3}\*)?\d{1,7}"
_NAME: Final = re.compile(
    rf"sharded\[({_RUN}(?:,{_RUN})*)\|((?:{_RUN}(?:,{_RUN})*)?)\](?:\.(servers|workers))?", re.ASCII
)


class Weights(NamedTuple):
    """The proportion of a buffer that each reducer folds.

    Args:
        workers: by rank; a worker that folds nothing has weight 0.
        servers: by place among the servers, whose ranks follow the workers'.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.workers) + sum(self.servers)

    @property
    def parts(self) -> tuple[str, ...]:
        """The `PARTS` with a weight above 0."""
        has = {"servers": any(self.servers), "workers": any(self.workers)}
        return tuple(part for part in PARTS if has[part])

    @property
    def reduced(self) -> Weights:
        """The same proportions in the smallest numbers, so that equal proportions share a name."""
        divisor = math.gcd(*self.workers, *self.servers) or 1
        return Weights(*(tuple(one // divisor for one in weights) for weights in self))

    def name(self, part: str = "") -> str:
        """Return the all-reduce's name for `find`, such as "sharded[8*1|4*3]"; UsageError if none.

        `part` is one of `PARTS`, or empty for both.
        """
        workers, servers = (_runs(weights) for weights in self.reduced)
        name = f"sharded[{workers}|{servers}]" + (f".{part}" if part else "")
        parse(name)
        return name


def parse(name: str) -> tuple[Weights, str]:
    """Read "sharded[8*1|4*3]", or one part of it with ".servers" or ".workers" behind it.

    The brackets hold the weights of the workers and, possibly none, of the servers. Equal weights
    in a row may be a run: 4*3 is 3,3,3,3.

    Returns: the weights, and the part; empty for both.

    Raises:
        UsageError: the text cannot be read, or exceeds a bound.
    """
    what = name if len(name) <= 80 else f"{name[:77]}..."
    if len(name) > MOST_NAME_BYTES:
        raise UsageError(f"{what!r}: the name has {len(name)} B; the limit is {MOST_NAME_BYTES} B")
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(
            f"cannot read the weights {what!r}: write sharded[8*1|4*3] for 8 workers of weight 1 "
            "and 4 servers of weight 3, and .servers or .workers behind it for one part"
        )
    workers, servers, part = match.groups()
    weights = Weights(_read(what, "workers", workers), _read(what, "servers", servers))
    if not weights.total:
        raise UsageError(f"{what}: all weights are 0; give at least one reducer a weight")
    if part and part not in weights.parts:
        raise UsageError(f"{what}: the {part} have no part: all their weights are 0")
    return weights, part or ""


def is_weighted(name: str) -> bool:
    """Return True if a name has the form that `parse` reads."""
    return name.startswith("sharded[")


def _read(what: str, role: str, text: str) -> tuple[int, ...]:
    runs = [run.rpartition("*") for run in text.split(",") if run]
    n = sum(int(count or 1) for count, _, _ in runs)
    if n > MOST_REDUCERS:
        raise UsageError(f"{what}: {n} {role}; the limit is {MOST_REDUCERS}")
    if wrong := [weight for _, _, weight in runs if int(weight) > MOST_WEIGHT]:
        raise UsageError(
            f"{what}: a weight of {wrong[0]} among the {role}; the limit is {MOST_WEIGHT}"
        )
    return tuple(int(weight) for count, _, weight in runs for _ in range(int(count or 1)))


def _runs(weights: Sequence[int]) -> str:
    def each() -> Iterator[str]:
        for weight, run in itertools.groupby(weights):
            n = len(list(run))
            yield f"{n}*{weight}" if n > 1 else str(weight)

    return ",".join(each())
