"""Sharded reduction: each stripe of the buffer is folded by one reducer, in the stripe's order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.chains import there_and_back
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step
from shoal.schedule.stripes import Reducer, Stripe, n_stripes_of, stripes_of, workers
from shoal.schedule.symmetry import StandIn, first_alike, swapped


def sharded_all_reduce(rank: int, size: int, stripes: Sequence[Stripe] = ()) -> Iterator[Step]:
    """Send every stripe to its reducer, which folds them in their own order and sends the results.

    A stripe's order begins with worker f and goes down: f, f-1, ... round to f+1, whoever reduces
    it. Each worker sends the stripe first that begins with it, and then those of the workers after
    it: at any time each stripe comes from another worker, so no link into a rank is shared (no
    incast) where every worker reduces the stripe that begins with it.

    Args:
        stripes: each with its first worker and its reducer; left out: stripe r of r, reduced by r.

    Cost:   2 rounds. With all n workers as reducers, each sends 2(n-1)/n of the buffer, 2/n of it
            to each peer. With k of them, a worker that is none sends the buffer once, and a reducer
            (k-1)/k of it and (n-1)/k: k ranks carry the load.
    Needs:  a chunk for each stripe (empty ones are legal). A worker that reduces a stripe that
            begins with another needs a scratch chunk, where its own part waits for its turn.
    Leaves: every stripe folded as ((f + (f-1)) + (f-2)) + ... on every worker: the same bits
            whoever reduces it.
    Source: Thangakrishnan et al. (Herring), SC 2020, with the workers as reducers (Fairring); the
            order is ours (docs/decisions/0012).
    """
    stripes = stripes or stripes_of(size)
    own = [stripe for stripe in stripes if stripe.reducer == rank]
    others = [stripe for stripe in stripes if stripe.reducer != rank] if rank < size else []
    for stripe in sorted(others, key=lambda stripe: (stripe.first - rank) % size):
        yield Send(stripe.reducer, stripe.chunk)
    if rank < size:
        yield from _fold(rank, size, own)
        yield from _tell(rank, size, own, Buffer.DATA)
    else:  # a server has no tensor
        own = [stripe._replace(chunk=place) for place, stripe in enumerate(own)]
        for turn in range(size):
            for stripe in own:
                worker = (stripe.first - turn) % size
                yield Recv(worker, stripe.chunk, fold=turn > 0, buffer=Buffer.SCRATCH)
        yield from _tell(rank, size, own, Buffer.SCRATCH)
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


def _tell(rank: int, size: int, own: Sequence[Stripe], buffer: Buffer) -> Iterator[Step]:
    """Send the results to all workers."""
    for stripe in own:
        yield Finish(stripe.chunk, buffer)
    for turn in range(size):
        for stripe in own:
            if (worker := (stripe.first + turn) % size) != rank:
                yield Send(worker, stripe.chunk, buffer)


def sharded_scratch(rank: int, size: int, stripes: Sequence[Stripe] = ()) -> tuple[int, ...]:
    """Scratch chunks of `sharded_all_reduce`; those of a server are all that it holds."""
    return tuple(one.chunk for one in stripes if one.reducer == rank != one.first)


def sharded(reducers: int | Sequence[Reducer]) -> Algorithm:
    """The sharded all-reduce with these reducers, or with so many of the workers, spread evenly.

    Raises:
        UsageError: there is none; or, when steps are asked for, there are more than workers.
    """
    if isinstance(reducers, int) and reducers < 1:
        raise UsageError(f"sharded({reducers}): at least one rank has to be a reducer")
    return _algorithm(_Sharding(reducers if isinstance(reducers, int) else tuple(reducers)))


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Who reduces what, in a group of whichever size."""

    reducers: int | tuple[Reducer, ...]
    n_stripes: int = 0

    def chunks(self, size: int) -> int:
        if isinstance(self.reducers, int) and self.reducers > size:
            raise UsageError(
                f"sharded({self.reducers}): {self.reducers} reducers are too many for {size} "
                f"ranks; at most sharded({size}) will do"
            )
        return self.n_stripes or size

    def stripes(self, size: int) -> tuple[Stripe, ...]:
        n_stripes, reducers = self.chunks(size), self.reducers
        if isinstance(reducers, int):
            reducers = workers(size, reducers, n_stripes)
        return stripes_of(size, reducers, n_stripes)

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        return sharded_all_reduce(rank, size, self.stripes(size))

    def scratch(self, rank: int, size: int) -> tuple[int, ...]:
        return sharded_scratch(rank, size, self.stripes(size))

    def owner(self, chunk: int, size: int) -> int:
        return self.stripes(size)[chunk].reducer

    def alike(self, rank: int, size: int) -> StandIn:
        return swapped(rank, _stand_ins(self, size)[rank])

    def fit(self, n_bytes: int, size: int) -> Algorithm:
        n_stripes = n_stripes_of(n_bytes, size)
        return _algorithm(replace(self, n_stripes=n_stripes if n_stripes < size else 0))


@functools.lru_cache(maxsize=64)
def _stand_ins(sharding: _Sharding, size: int) -> list[int]:
    """Of each worker, the first that reduces as many stripes, as many of them from the first on."""
    n_all, n_first = [0] * size, [0] * size
    for stripe in sharding.stripes(size):
        if stripe.reducer < size:
            n_all[stripe.reducer] += 1
            n_first[stripe.reducer] += stripe.reducer == stripe.first
    return first_alike([*zip(n_all, n_first, strict=True)])


# One object for each of them: programs are known by their algorithm.
@functools.lru_cache(maxsize=1024)
def _algorithm(sharding: _Sharding) -> Algorithm:
    return Algorithm(
        sharding.steps,
        sharding.chunks,
        sharding.scratch,
        owner_rule=sharding.owner,
        fit_rule=sharding.fit,
        encodes_once=True,
        scatters=True,
        chain_rule=there_and_back,
        alike_rule=sharding.alike,
        explained_by=sharded_all_reduce,
    )
