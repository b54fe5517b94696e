"""Sharded reduction: some ranks, or all of them, are the reducers of one shard each."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.steps import Finish, Recv, Send, Step


def sharded_all_reduce(rank: int, size: int, n_reducers: int = 0) -> Iterator[Step]:
    """Send every reducer its shard, fold the own one, send the result to everyone.

    Rank r sends to the reducers after it first, and a reducer folds what comes from r-1 first,
    then from r-2: at any time each rank sends to another one, so no link into a rank is shared
    (no incast) where all ranks are reducers.

    Args:
        n_reducers: k; 0 for all ranks.

    Cost:   2 rounds; with n reducers, each rank sends 2(n-1)/n of the buffer, 2/n of it to each
            peer. With k of them, a rank that is none sends the buffer once, and a reducer
            (k-1)/k of it and (n-1)/k: fewer and longer messages, but k ranks carry the load.
    Needs:  k chunks (empty ones are legal).
    Leaves: every chunk folded over all ranks, on every rank.
    Source: Thangakrishnan et al. (Herring), SC 2020, with the workers as reducers (Fairring).
    """
    k = n_reducers or size
    reducers = [shard_owner(chunk, size, k) for chunk in range(k)]
    first = bisect_right(reducers, rank)
    after = [chunk % k for chunk in range(first, first + k) if reducers[chunk % k] != rank]
    for chunk in after:
        yield Send(reducers[chunk], chunk)
    if len(after) < k:
        own = first - 1
        for distance in range(1, size):
            yield Recv((rank - distance) % size, own, fold=True)
        yield Finish(own)
        for distance in range(1, size):
            yield Send((rank + distance) % size, own)
    for chunk in reversed(after):
        yield Recv(reducers[chunk], chunk)


def shard_owner(chunk: int, size: int, n_reducers: int = 0) -> int:
    """The reducer of a shard: the k of them are spread evenly over the ranks."""
    return chunk * size // (n_reducers or size)


def sharded(n_reducers: int) -> Algorithm:
    """The sharded all-reduce with that many reducers.

    Raises:
        UsageError: fewer than one; or, when steps are asked for, more than there are ranks.
    """
    if n_reducers < 1:
        raise UsageError(f"sharded({n_reducers}): at least one rank has to be a reducer")

    def chunks(size: int) -> int:
        if n_reducers > size:
            raise UsageError(
                f"sharded({n_reducers}): {n_reducers} reducers are too many for {size} ranks; "
                f"at most sharded({size}) will do"
            )
        return n_reducers

    def steps(rank: int, size: int) -> Iterator[Step]:
        return sharded_all_reduce(rank, size, chunks(size))

    owner = functools.partial(shard_owner, n_reducers=n_reducers)
    return Algorithm(steps, chunks, owner_rule=owner, explained_by=sharded_all_reduce)
