"""Sharded reduction: each stripe of the buffer is folded by one reducer, in the stripe's order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.chains import there_and_back
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step
from shoal.schedule.stripes import Stripe, n_stripes_of, stripes_of
from shoal.schedule.symmetry import StandIn, first_alike, swapped


def sharded_all_reduce(rank: int, size: int, stripes: Sequence[Stripe] = ()) -> Iterator[Step]:
    """Send every stripe to its reducer, which folds them in their own order and sends the results.

    A stripe's order begins with worker f and goes down: f, f-1, ... round to f+1, whichever worker
    reduces it. Each worker first sends the stripe that begins with it, then those of the workers
    after it. So at any time each stripe comes from another worker, and no link into a rank is
    shared (no incast) if every worker reduces the stripe that begins with it.

    Args:
        stripes: with first worker and reducer; left out: worker r is both for stripe r.

    Cost:   2 rounds. With all n workers as reducers, each sends 2(n-1)/n of the buffer, 2/n of it
            to each peer. With k reducers, another worker sends the buffer once, and a reducer
            (k-1)/k of it and (n-1)/k: k ranks carry the load.
    Needs:  a chunk for each stripe (empty ones are legal). A worker that reduces a stripe that
            begins with another needs a scratch chunk, where its own part waits for its turn.
    Leaves: every stripe folded as ((f + (f-1)) + (f-2)) + ... on every worker: the same bits
            whichever worker reduces it.
    Source: Thangakrishnan et al. (Herring), SC 2020, with the workers as reducers (Fairring); the
            order is ours (docs/decisions/0012).
    """
    stripes = stripes or stripes_of(size)
    own = [stripe for stripe in stripes if stripe.reducer == rank]
    others = [stripe for stripe in stripes if stripe.reducer != rank]
    for stripe in sorted(others, key=lambda stripe: (stripe.first - rank) % size):
        yield Send(stripe.reducer, stripe.chunk)
    yield from _fold(rank, size, own)
    for stripe in own:
        yield Finish(stripe.chunk)
    for turn in range(size):
        for stripe in own:
            if (worker := (stripe.first + turn) % size) != rank:
                yield Send(worker, stripe.chunk)
    for stripe in sorted(others, key=lambda stripe: (rank - stripe.first) % size):
        yield Recv(stripe.reducer, stripe.chunk)


def _fold(rank: int, size: int, own: Sequence[Stripe]) -> Iterator[Step]:
    """Fold the own stripes, with the own part of each in its turn."""
    late = [stripe.chunk for stripe in own if stripe.first != rank]
    for place, chunk in enumerate(late):
        yield Copy(chunk, into=place)
    saved = {chunk: place for place, chunk in enumerate(late)}
    for turn in range(size):
        for stripe in own:
            worker = (stripe.first - turn) % size
            if worker != rank:
                yield Recv(worker, stripe.chunk, fold=turn > 0)
            elif turn > 0:
                place = saved[stripe.chunk]
                yield Copy(place, stripe.chunk, Buffer.SCRATCH, Buffer.DATA, fold=True)


def sharded(n_reducers: int | None = None) -> Algorithm:
    """Return the sharded all-reduce with this many of the workers as reducers, or with all.

    Its `n_chunks` and `steps` raise UsageError if there are more reducers than workers.

    Raises:
        UsageError: there is no reducer.
    """
    if n_reducers == 0:
        raise UsageError("sharded(0): at least one rank has to be a reducer")
    return _algorithm(_Sharding(n_reducers or 0))


class _Sharding(NamedTuple):
    """The stripes and reducers of a group of any size."""

    n_reducers: int  # 0: all workers
    n_stripes: int = 0

    def chunks(self, size: int) -> int:
        if self.n_reducers > size:
            raise UsageError(
                f"sharded({self.n_reducers}): {self.n_reducers} reducers are too many for {size} "
                f"ranks; give at most sharded({size})"
            )
        return self.n_stripes or size

    def stripes(self, size: int) -> tuple[Stripe, ...]:
        return stripes_of(size, self.n_reducers, self.chunks(size))

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        return sharded_all_reduce(rank, size, self.stripes(size))

    def scratch(self, rank: int, size: int) -> tuple[int, ...]:
        """A place for the own part of each stripe that this rank reduces in a later turn."""
        return tuple(s.chunk for s in self.stripes(size) if s.reducer == rank != s.first)

    def owner(self, chunk: int, size: int) -> int:
        return self.stripes(size)[chunk].reducer

    def alike(self, rank: int, size: int) -> StandIn:
        return swapped(rank, _stand_ins(self, size)[rank])

    def fit(self, n_bytes: int, size: int) -> Algorithm:
        n_stripes = n_stripes_of(n_bytes, size)
        return _algorithm(self._replace(n_stripes=n_stripes if n_stripes < size else 0))


@functools.lru_cache(maxsize=64)
def _stand_ins(sharding: _Sharding, size: int) -> list[int]:
    """By worker, the first that reduces as many stripes, and is as often first in their order."""
    n_all, n_first = [0] * size, [0] * size
    for stripe in sharding.stripes(size):
        n_all[stripe.reducer] += 1
        n_first[stripe.reducer] += stripe.reducer == stripe.first
    return first_alike([*zip(n_all, n_first, strict=True)])


# One object per sharding: programs are cached by their algorithm.
@functools.lru_cache(maxsize=1024)
def _algorithm(sharding: _Sharding) -> Algorithm:
    return Algorithm(
        sharding.steps,
        there_and_back,
        sharding.chunks,
        sharding.scratch,
        owner_rule=sharding.owner,
        fit_rule=sharding.fit,
        encodes_once=True,
        scatters=True,
        alike_rule=sharding.alike,
        explained_by=sharded_all_reduce,
    )
