"""Sharded reduction: every rank is the reducer of one shard of the buffer."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Finish, Recv, Send, Step


def sharded_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Send every reducer its shard, fold the own one, send the result to everyone.

    Rank r sends to r+1 first, then to r+2, and folds what comes from r-1 first, then from r-2:
    at any time each rank sends to another one, so no link into a rank is shared (no incast).

    Cost:   2 rounds; each rank sends 2(n-1)/n of the buffer, 2/n of it to each peer.
    Needs:  n chunks (empty ones are legal).
    Leaves: every chunk folded over all ranks, on every rank.
    Source: Thangakrishnan et al. (Herring), SC 2020, with the workers as reducers (Fairring).
    """
    after = [(rank + k) % size for k in range(1, size)]
    before = [(rank - k) % size for k in range(1, size)]
    for reducer in after:
        yield Send(reducer, chunk=reducer)
    for worker in before:
        yield Recv(worker, chunk=rank, fold=True)
    yield Finish(chunk=rank)
    for worker in after:
        yield Send(worker, chunk=rank)
    for reducer in before:
        yield Recv(reducer, chunk=reducer)
