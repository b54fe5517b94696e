"""Count the work of an all-reduce with servers, for ranks and NICs, from its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.limits import SEGMENT_BYTES
from shoal.schedule import Copy, Finish, Send, find
from shoal.schedule.counts import Counts, StepCounts

if TYPE_CHECKING:
    from shoal.schedule import Algorithm
    from shoal.schedule.weights import Weights

# In groups up to this size every rank is counted; in larger ones the ranks with the most work.
_FEW_RANKS: Final = 48


def count_served(weights: Weights, n_bytes: int, slower: Sequence[tuple[float, float]]) -> Counts:
    """Count in chunks of the mean length of a buffer that is cut by weights.

    `slower` is by NIC, out and in, its time for a byte over that of the cluster's wire. Takes the
    steps of at most 48 ranks, and of 7 in larger groups.
    """
    n, size = len(weights.workers), len(weights.workers) + len(weights.servers)
    algorithm = find("all_reduce", weights.name()).fitted(n_bytes, size)
    assert algorithm.cut_rule is not None  # it is by weights
    lengths = algorithm.cut_rule(n_bytes, size)[1]
    mean = n_bytes / len(lengths) or 1.0
    ranks, nics, n_peers = [], [], 0
    for rank in _counted_ranks(weights, slower):
        work, peers = _work(algorithm, rank, size, [length / mean for length in lengths], mean)
        ranks.append(work)
        out, into = slower[rank]
        nics.append(work._replace(sent=work.sent * out, received=work.received * into))
        n_peers = max(n_peers, peers)
    return Counts(
        n_chunks=len(lengths),
        n_scratch=max(len(algorithm.scratch(rank, size)) for rank in {0, n // 2, n - 1}),
        ranks=tuple(dict.fromkeys(ranks)),
        hosts=tuple(dict.fromkeys(nics)),
        n_intra=0,
        n_inter=len(algorithm.chain(size)),
        n_peers=n_peers,
    )


def _counted_ranks(weights: Weights, slower: Sequence[tuple[float, float]]) -> Sequence[int]:
    """Return all ranks of a small group, else those of each role with the most for their NIC."""
    n, size = len(weights.workers), len(slower)
    if size <= _FEW_RANKS:
        return range(size)
    shares = (*weights.workers, *weights.servers)
    by_load = sorted(range(size), key=lambda rank: -shares[rank] * max(slower[rank]))
    slowest = max(range(n), key=lambda rank: max(slower[rank]))
    workers = [rank for rank in by_load if rank < n]
    servers = [rank for rank in by_load if rank >= n]
    return sorted({0, n - 1, slowest, *workers[:2], *servers[:2]})


def _work(
    algorithm: Algorithm, rank: int, size: int, lengths: Sequence[float], mean: float
) -> tuple[StepCounts, int]:
    """Return the work of a rank, and the number of others that it exchanges with."""
    n_copied = n_messages = 0.0
    sent, received = [0.0, 0.0], [0.0, 0.0]  # chunks that others fold, and chunks folded here
    to, source = set[int](), set[int]()
    like = algorithm.scratch(rank, size)
    steps = list(algorithm.steps(rank, size))
    own = {step.chunk for step in steps if isinstance(step, Finish)}
    each = max(1, -(-mean // SEGMENT_BYTES))
    for step in steps:
        if isinstance(step, Finish):
            continue
        n = lengths[like[step.chunk] if step.buffer and like else step.chunk]
        if isinstance(step, Copy):
            n_copied += n
            continue
        n_messages += -(-n * mean // SEGMENT_BYTES) / each
        chunks, peers = (sent, to) if isinstance(step, Send) else (received, source)
        chunks[step.chunk in own] += n
        peers.add(step.peer)
    work = StepCounts(
        inter=n_messages,
        moved=n_copied + sent[False] + received[True] + received[False] + sent[True],
        sent=sum(sent),
        received=sum(reversed(received)),
        before=received[True],
        passed_on=sent[True],
    )
    return work, min(len(to), len(source))
