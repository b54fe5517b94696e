"""Kinds of calls: what ranks must agree on, in words, and where the chunks of their buffers lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from shoal.codec import Codec
from shoal.dtypes import DType, Op, item_size
from shoal.limits import SEGMENT_BYTES
from shoal.schedule import COLLECTIVES, MESSAGE, Algorithm, Blocks, Root, find
from shoal.schedule.stripes import LINE_BYTES

# Where a chunk of each rank has to come before anything goes back, the first and the last segments
# of all ranks pass alone: 2 in 64 of the time. Shorter ones would cost more than they save.
_SEGMENTS_OF_CHUNK: Final = 64
_LEAST_SEGMENT_BYTES: Final = 32 << 10
# Sends take turns, a segment to each reducer, and little more than this may be out at a time on
# slow links (group/context.py). Where one turn is more, half of the reducers' links stand idle:
# 8 workers and 8 servers at 400 Mbit/s took 1.40 times what 100 MiB take on the link with 1 MiB in
# a turn, and 1.05 with 256 KiB; with 128 KiB no less, and more messages.
_TURN_BYTES: Final = 256 << 10

Layout = tuple[list[int], list[int]]
"""Of one buffer: the offset of every chunk, and its length; bytes."""

_EMPTY: Final[Layout] = ([], [])


class Shape(NamedTuple):
    """Everything that makes two calls the same kind: they share one plan.

    Args:
        collective: a key of `COLLECTIVES`, or `MESSAGE`; `algorithm` a name that `find` knows.
        n_elems: of the in-place buffer, or of one rank's block (all_gather, reduce_scatter,
            gather, scatter, all_to_all).
        root: the one rank that gives or gets all, or the peer of a send or recv (-1: any); else 0.
        hosts: the host of every rank, numbered in the order in which they first come up.
        blocks: elements of every rank's block where these differ (all_gather, reduce_scatter);
            `n_elems` is 0 then.
        sent, taken: elements of the blocks that this rank sends to every rank, and takes from it,
            where these differ (all_to_all); `n_elems` is 0 then.
        codec: how elements travel between hosts.
        n_lanes: over how many channels the segments go, see `Plan::n_lanes`.
        rounds_own: what a rank folds is rounded as what it is sent is, its own part too: so the
            bits do not tell who folded. Only with a narrow codec and a host for each rank.
        priority: see `Plan::priority`; ranks may differ in it.
    """

    collective: str
    algorithm: str
    dtype: DType
    op: Op
    n_elems: int
    rank: int
    size: int
    root: int = 0
    hosts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    codec: Codec = Codec.IDENTITY
    n_lanes: int = 1
    rounds_own: bool = False
    priority: int = 0

    @property
    def found(self) -> Algorithm:
        """The algorithm in the table, in its form for buffers of this length."""
        algorithm = find(self.collective, self.algorithm)
        return algorithm.fitted(self.n_elems * item_size(self.dtype), self.size)

    @property
    def segment_bytes(self) -> int:
        """How long a segment is, in memory; the same on every rank."""
        algorithm = self.found
        if not algorithm.scatters or len(set(self.hosts)) < self.size:
            return SEGMENT_BYTES
        n_chunks = algorithm.n_chunks(self.size, self.hosts)
        chunk = self.n_elems * item_size(self.dtype) // n_chunks
        of_turn = _TURN_BYTES / self.codec.share / n_chunks
        least = _LEAST_SEGMENT_BYTES / self.codec.share
        wanted = int(max(least, min(chunk / _SEGMENTS_OF_CHUNK, of_turn)))
        return min(SEGMENT_BYTES, 1 << (wanted.bit_length() - 1))

    @property
    def n_workers(self) -> int:
        """How many of the ranks bring a tensor: all, or those before the servers."""
        return self.size - self.found.n_servers

    @property
    def agrees_by_pair(self) -> bool:
        """Whether only two ranks know how long the block between them is, and tell each other."""
        row = COLLECTIVES.get(self.collective)
        return row is not None and row.by_pair and self.found.takes_uneven


def agreement(shape: Shape) -> str:
    """What a call does, as far as every rank must agree on it: a send and its receive say the same.

    Who meets whom follows from the key of a message.
    """
    if shape.collective == MESSAGE:
        return f"message {shape.dtype}[{shape.n_elems}]"
    return describe(shape)


def describe(shape: Shape) -> str:
    """What a call does, in words for people."""
    length = f"[{','.join(map(str, shape.blocks)) or shape.n_elems}]"
    if shape.collective == MESSAGE:
        peer = f"rank {shape.root}" if shape.root >= 0 else "any rank"
        way = "to" if shape.algorithm == "send" else "from"
        return f"{shape.algorithm} {shape.dtype}{length} {way} {peer}"
    what, row = shape.collective, COLLECTIVES[shape.collective]
    if row.carries:
        what += f" {shape.dtype}{'' if shape.agrees_by_pair else length}"
    if row.folds:
        what += f" {shape.op}"
    if row.root is not Root.NONE:
        what += f" {row.root.value} rank {shape.root}"
    narrow = "" if shape.codec is Codec.IDENTITY else f", in {shape.codec} between hosts"
    narrow += ", own parts rounded too" if shape.rounds_own else ""
    lanes = "" if shape.n_lanes == 1 else f", over {shape.n_lanes} channels"
    return f"{what} by {shape.algorithm}{narrow}{lanes}"


def layouts_of(shape: Shape) -> list[Layout]:
    """Where every chunk lies in DATA, INPUT, OUTPUT and SCRATCH."""
    item, size, algorithm = item_size(shape.dtype), shape.size, shape.found
    row = COLLECTIVES.get(shape.collective)
    if row is None or row.in_place:
        data = cut(algorithm, shape.n_elems, item, size, shape.hosts)
        lengths, callers = data[1], [data, _EMPTY, _EMPTY]
        if shape.rank >= size - algorithm.n_servers:
            callers = [_EMPTY] * 3
    else:
        lengths = [n * item for n in shape.blocks or (shape.n_elems,) * size]
        callers = [_EMPTY, _blocks(shape, row.reads, lengths), _blocks(shape, row.writes, lengths)]
    if shape.sent or shape.taken:
        apart = ([n * item for n in ns] for ns in (shape.sent, shape.taken))
        callers = [_EMPTY, *map(_consecutive, apart)]
    like = algorithm.scratch(shape.rank, size, shape.hosts, shape.root)
    return [*callers, _scratch(lengths, like)]


def _blocks(shape: Shape, which: Blocks, lengths: list[int]) -> Layout:
    """Those blocks of all that this rank has in a buffer."""
    if which is Blocks.OWN:
        return [0], [lengths[shape.rank]]
    has_all = which is Blocks.ALL or (which is Blocks.AT_ROOT and shape.rank == shape.root)
    return _consecutive(lengths) if has_all else _EMPTY


def _consecutive(lengths: list[int]) -> Layout:
    """Chunks one after the other."""
    return list(itertools.accumulate(lengths, initial=0))[:-1], lengths


def _scratch(lengths: Sequence[int], like: Sequence[int]) -> Layout:
    """Scratch chunks as long as the chunks they are `like`, each on cache lines of its own."""
    n_bytes = [lengths[chunk] for chunk in like]
    strides = [-(-n // LINE_BYTES) * LINE_BYTES for n in n_bytes]
    return list(itertools.accumulate(strides, initial=0))[:-1], n_bytes


def cut(
    algorithm: Algorithm, n_elems: int, item: int, size: int, hosts: Sequence[int] = ()
) -> Layout:
    """Where the chunks of a buffer that is worked on in place lie, and how long they are."""
    if algorithm.cut_rule:
        return algorithm.cut_rule(n_elems * item, size)
    return balanced(n_elems, item, algorithm.n_chunks(size, hosts))


def balanced(n_elems: int, item: int, n_chunks: int) -> Layout:
    """Chunks of equal length but for the last ones, which may be shorter or empty."""
    if n_chunks == 1:
        return [0], [n_elems * item]
    line = max(1, LINE_BYTES // item)
    stride = -(-n_elems // n_chunks)
    stride = -(-stride // line) * line
    begins = [min(chunk * stride, n_elems) for chunk in range(n_chunks + 1)]
    lengths = [(end - begin) * item for begin, end in itertools.pairwise(begins)]
    return [begin * item for begin in begins[:-1]], lengths
