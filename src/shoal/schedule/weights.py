"""Weights of reducers, and the names of all-reduces that are sharded by them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from shoal.errors import UsageError

# A name comes from a peer, too: what it may ask for is bounded before anything is made of it.
MOST_REDUCERS: Final = 4096
"""Workers, and servers, that a name may speak of; and segments of stripes follow from these."""
MOST_WEIGHT: Final = 1 << 20
"""The largest weight: finer shares than a millionth are lost in whole cache lines."""
MOST_NAME_BYTES: Final = 4096
"""The longest name."""

PARTS: Final = ("servers", "workers")
"""What one of two calls does that share a buffer: the chunks whose reducers are these."""

_NAME: Final = re.compile(r"sharded\[([\d*,]+)\|([\d*,]*)\](?:\.(servers|workers))?", re.ASCII)
_RUN: Final = re.compile(r"(?:([1-9]\d{0,3})\*)?(\d{1,7})", re.ASCII)


class Weights(NamedTuple):
    """How much of a buffer each reducer folds, in proportion.

    Args:
        workers: by rank; all workers of the group, those that fold nothing with weight 0.
        servers: by place among the servers; the ranks of a group number them after the workers.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()

    def checked(self, what: str) -> Weights:
        """Itself.

        Args:
            what: whose weights these are, for the message.

        Raises:
            UsageError: nobody could reduce by them, or they are beyond what is bounded.
        """
        for role, weights in (("workers", self.workers), ("servers", self.servers)):
            if len(weights) > MOST_REDUCERS:
                raise UsageError(f"{what}: {len(weights)} {role}, at most {MOST_REDUCERS} will do")
            wrong = [weight for weight in weights if not 0 <= weight <= MOST_WEIGHT]
            if wrong:
                raise UsageError(
                    f"{what}: a weight of {wrong[0]} among the {role}; weights are whole numbers "
                    f"from 0 to {MOST_WEIGHT}"
                )
        if not self.workers:
            raise UsageError(f"{what}: there are no workers, so there is nothing to reduce")
        if not self.total:
            raise UsageError(f"{what}: all weights are 0, so nobody reduces; give one a weight")
        return self

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self.workers) + sum(self.servers)

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of `PARTS` that have something to fold."""
        has = {"servers": any(self.servers), "workers": any(self.workers)}
        return tuple(part for part in PARTS if has[part])

    @property
    def reduced(self) -> Weights:
        """The same proportions in the smallest numbers: so those that are equal have one name."""
        divisor = math.gcd(*self.workers, *self.servers) or 1
        return Weights(*(tuple(one // divisor for one in weights) for weights in self))

    def name(self, part: str = "") -> str:
        """What `find` knows an all-reduce by these weights as: "sharded[8*1|4*3]".

        Args:
            part: one of `PARTS`, or empty for both.

        Raises:
            UsageError: see `checked`; or the part has nothing to fold, or the name gets longer than
                `MOST_NAME_BYTES`.
        """
        workers, servers = (_runs(weights) for weights in self.checked("these weights").reduced)
        name = f"sharded[{workers}|{servers}]" + (f".{part}" if part else "")
        parse(name)
        return name


def parse(name: str) -> tuple[Weights, str]:
    """Read "sharded[8*1|4*3]", or one part of it with ".servers" or ".workers" behind it.

    Within the brackets are the weights of the workers and those of the servers, of which there may
    be none; equal ones that follow one another are a run: 4*3 is 3,3,3,3.

    Returns: the weights, and the part; empty for both.

    Raises:
        UsageError: it says what cannot be, or more than is bounded.
    """
    what = name if len(name) <= 80 else f"{name[:77]}..."
    if len(name) > MOST_NAME_BYTES:
        raise UsageError(f"{what!r}: a name of {len(name)} B, at most {MOST_NAME_BYTES} B will do")
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(
            f"cannot read the weights {what!r}: write sharded[8*1|4*3] for 8 workers of weight 1 "
            "and 4 servers of weight 3, and .servers or .workers behind it for one part"
        )
    workers, servers, part = match.groups()
    weights = Weights(_read(what, "workers", workers), _read(what, "servers", servers))
    weights.checked(what)
    if part and part not in weights.parts:
        raise UsageError(f"{what}: no weight is above 0 among the {part}: they have no part")
    return weights, part or ""


def is_weighted(name: str) -> bool:
    """Whether `parse` is who knows what a name means."""
    return name.startswith("sharded[")


def _read(what: str, role: str, text: str) -> tuple[int, ...]:
    runs = []
    for run in text.split(",") if text else ():
        match = _RUN.fullmatch(run)
        if not match:
            raise UsageError(
                f"{what}: cannot read {run!r} among the {role}; write 3 for one weight, or 4*3 for "
                "four of them"
            )
        runs.append((int(match[1] or 1), int(match[2])))
    n = sum(count for count, _ in runs)
    if n > MOST_REDUCERS:
        raise UsageError(f"{what}: {n} {role}, at most {MOST_REDUCERS} will do")
    return tuple(itertools.chain.from_iterable([weight] * count for count, weight in runs))


def _runs(weights: Sequence[int]) -> str:
    def each() -> Iterator[str]:
        for weight, run in itertools.groupby(weights):
            n = len(list(run))
            yield f"{n}*{weight}" if n > 1 else str(weight)

    return ",".join(each())
