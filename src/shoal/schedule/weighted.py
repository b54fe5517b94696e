"""Sharded reduction by weights: workers and servers fold as much as their links can carry."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step
from shoal.schedule.stripes import LINE_BYTES, first_of, n_stripes_of, stride_of
from shoal.schedule.symmetry import itself, turned
from shoal.schedule.weights import Weights, parse


def weighted_all_reduce(rank: int, n_workers: int, chunks: Sequence[Piece]) -> Iterator[Step]:
    """Send every chunk to its reducer, which folds it in the order of its stripe and sends it back.

    A stripe is cut into chunks of different reducers, which all fold it in the stripe's order
    (`sharded_all_reduce`). Every worker sends the chunks of one reducer in the same order, so the
    first chunks are complete before the last arrive, and both directions of a NIC are busy. It
    sends the first chunks of all reducers before the second ones, beginning with the reducer of the
    stripe that it is first in, so workers begin with different reducers (no incast).

    Args:
        n_workers: ranks from here on are servers, which bring no tensor.
        chunks: the parts of stripes, with their reducers.

    Cost:   2 rounds. A worker i that reduces the share s_i sends and receives 1 + (n-2) s_i
            buffers; a server that reduces v sends and receives n v.
    Needs:  a chunk for each part of a stripe that a reducer has (empty ones are legal). A server
            holds its chunks in scratch; a worker its own part of chunks whose order begins with
            another worker.
    Leaves: the bits of `sharded`, for any weights and any number of servers.
    Source: Jiang et al. (BytePS), OSDI 2020, who share the work between workers and servers by what
            their links carry; Thangakrishnan et al. (Herring), SC 2020.
    """
    own = [chunk for chunk in chunks if chunk.reducer == rank]
    if rank >= n_workers:
        for place, chunk in enumerate(own):
            yield from _fold(rank, n_workers, chunk._replace(chunk=place), Buffer.SCRATCH)
        return
    others = [chunk for chunk in chunks if chunk.reducer != rank]
    for chunk in _in_turn(others, lambda chunk: (chunk.first - rank) % n_workers):
        yield Send(chunk.reducer, chunk.chunk)
    places = iter(range(len(own)))
    for chunk in own:
        place = next(places) if chunk.first != rank else -1
        yield from _fold(rank, n_workers, chunk, Buffer.DATA, place)
    for chunk in _in_turn(others, lambda chunk: (rank - chunk.first) % n_workers):
        yield Recv(chunk.reducer, chunk.chunk)


def _in_turn(chunks: Sequence[Piece], distance: Callable[[Piece], int]) -> list[Piece]:
    """Return the first chunk of each reducer, then the second ones; the nearest reducer first."""
    nearest: dict[int, int] = {}
    turns: Counter[int] = Counter()
    keyed = []
    for chunk in chunks:
        reducer = chunk.reducer
        nearest[reducer] = min(distance(chunk), nearest.get(reducer, distance(chunk)))
        keyed.append((turns[reducer], chunk))
        turns[reducer] += 1
    keyed.sort(key=lambda pair: (pair[0], nearest[pair[1].reducer], pair[1]))
    return [chunk for _, chunk in keyed]


def _fold(rank: int, n_workers: int, own: Piece, buffer: Buffer, saved: int = -1) -> Iterator[Step]:
    """Fold one chunk, with the own part in its turn, and send it to all workers.

    Args:
        saved: the scratch chunk that holds the own part; -1: it is first, or there is none.
    """
    if saved >= 0:
        yield Copy(own.chunk, into=saved)
    for turn in range(n_workers):
        worker = (own.first - turn) % n_workers
        if worker != rank:
            yield Recv(worker, own.chunk, fold=turn > 0, buffer=buffer)
        elif turn > 0:
            yield Copy(saved, own.chunk, Buffer.SCRATCH, Buffer.DATA, fold=True)
    yield Finish(own.chunk, buffer)
    for turn in range(n_workers):
        if (worker := (own.first + turn) % n_workers) != rank:
            yield Send(worker, own.chunk, buffer)


class Piece(NamedTuple):
    """A reducer's part of a stripe, which is a chunk of the buffer."""

    chunk: int
    first: int
    """The first worker in the order of its stripe."""
    reducer: int
    stripe: int
    begin: int
    end: int
    """The part spans the total weight from `begin` to `end`."""


@functools.lru_cache(maxsize=64)
def _pieces(weights: Weights, part: str, n_stripes: int) -> tuple[Piece, ...]:
    """Return all chunks of a part, or of both if it is empty, in the order of their places.

    A worker has the end of the stripe that begins with it, so its own part need not wait. The rest
    of the stripes goes to the servers, one range each, then to workers that weigh more than a
    stripe.
    """
    n, total = len(weights.workers), weights.total
    left = [weight * n_stripes for weight in weights.workers]
    firsts = [first_of(stripe, n, n_stripes) for stripe in range(n_stripes)]
    kept = [min(left[first], total) for first in firsts]
    for first, own in zip(firsts, kept, strict=True):
        left[first] -= own
    takers = [(n + j, weight * n_stripes) for j, weight in enumerate(weights.servers)]
    takers = [taker for taker in (*takers, *enumerate(left)) if taker[1]][::-1]
    pieces = []
    for stripe, own in enumerate(kept):
        at, end = 0, total - own
        while at < end:
            reducer, has = takers.pop()
            upto = min(end, at + has)
            pieces.append((reducer, stripe, at, upto))
            if has > upto - at:
                takers.append((reducer, has - (upto - at)))
            at = upto
        if own:
            pieces.append((firsts[stripe], stripe, end, total))
    pieces = [piece for piece in pieces if not part or (piece[0] >= n) == (part == "servers")]
    return tuple(Piece(chunk, firsts[piece[1]], *piece) for chunk, piece in enumerate(pieces))


def weighted(name: str) -> Algorithm:
    """Return the all-reduce of a name that `weights.parse` reads.

    Its `n_chunks` and `steps` raise UsageError unless the group has as many ranks as the name:
    workers and servers together, or with ".workers" only these.

    Raises:
        UsageError: the name cannot be read.
    """
    return _algorithm(_Weighted(*parse(name)))


class _Weighted(NamedTuple):
    """The chunks and reducers of the one group size that the weights are for."""

    weights: Weights
    part: str
    n_stripes: int = 0

    @property
    def n_workers(self) -> int:
        return len(self.weights.workers)

    @property
    def n_servers(self) -> int:
        return 0 if self.part == "workers" else len(self.weights.servers)

    @property
    def is_plain(self) -> bool:
        """True if its steps equal the plain sharded all-reduce, with one stripe per worker."""
        servers, workers = sum(self.weights.servers), self.weights.workers
        return not servers and not self.n_servers and not self.n_stripes and len(set(workers)) == 1

    def pieces(self, size: int) -> tuple[Piece, ...]:
        if size != self.n_workers + self.n_servers:
            servers = f" and {self.n_servers} servers" if self.n_servers else ""
            raise UsageError(
                f"{self.weights.name(self.part)} is for {self.n_workers} workers{servers}, not for "
                f"a group of {size} ranks"
            )
        return _pieces(self.weights, self.part, self.n_stripes or self.n_workers)

    def chunks(self, size: int) -> int:
        return len(self.pieces(size))

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        return weighted_all_reduce(rank, self.n_workers, self.pieces(size))

    def scratch(self, rank: int, size: int) -> tuple[int, ...]:
        own = (chunk for chunk in self.pieces(size) if chunk.reducer == rank != chunk.first)
        return tuple(chunk.chunk for chunk in own)

    def owner(self, chunk: int, size: int) -> int:
        return self.pieces(size)[chunk].reducer

    def fit(self, n_bytes: int, size: int) -> Algorithm:
        n_stripes = n_stripes_of(n_bytes, self.n_workers)
        n_stripes = n_stripes if n_stripes < self.n_workers else 0
        return _algorithm(self._replace(n_stripes=n_stripes))

    def cut(self, n_bytes: int, size: int, unit: int = LINE_BYTES) -> tuple[list[int], list[int]]:
        """Return the offsets and lengths of the chunks, in whole units of their stripe."""
        pieces, total = self.pieces(size), self.weights.total
        stride = stride_of(n_bytes, self.n_stripes or self.n_workers, unit) // unit
        n_units = -(-n_bytes // unit)

        def at(stripe: int, part: int) -> int:
            begin, end = (min(s * stride, n_units) for s in (stripe, stripe + 1))
            return min(n_bytes, (begin + (end - begin) * part // total) * unit)

        begins = [at(piece.stripe, piece.begin) for piece in pieces]
        ends = [at(piece.stripe, piece.end) for piece in pieces]
        return begins, [end - begin for begin, end in zip(begins, ends, strict=True)]

    def chain(self, size: int) -> list[tuple[int, int]]:
        """Return a message to a reducer, and its answer."""
        reducer = self.pieces(size)[0].reducer
        others = [worker for worker in range(self.n_workers) if worker != reducer]
        return [(others[0], reducer), (reducer, others[0])] if others else []


# One object per name: programs are cached by their algorithm.
@functools.lru_cache(maxsize=256)
def _algorithm(one: _Weighted) -> Algorithm:
    return Algorithm(
        one.steps,
        one.chain,
        one.chunks,
        one.scratch,
        owner_rule=one.owner,
        fit_rule=one.fit,
        cut_rule=one.cut,
        encodes_once=True,
        scatters=True,
        alike_rule=turned if one.is_plain else itself,
        n_servers=one.n_servers,
        is_part=bool(one.part) and len(one.weights.parts) > 1,
        explained_by=weighted_all_reduce,
    )
