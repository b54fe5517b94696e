"""Kinds of calls: the text that ranks must agree on, and the layout of chunks in their buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal import schedule
from shoal.codec import Codec
from shoal.limits import SEGMENT_BYTES
from shoal.schedule import COLLECTIVES, MESSAGE, Blocks, Root
from shoal.schedule.stripes import LINE_BYTES, stride_of

if TYPE_CHECKING:
    from shoal.dtypes import DType, Op
    from shoal.schedule import Algorithm

# Results can leave only after a chunk of each rank has arrived, so the first and last segments do
# not overlap with others: 2 in 64 of the time. Shorter segments would cost more than they save.
_SEGMENTS_OF_CHUNK: Final = 64
_LEAST_SEGMENT_BYTES: Final = 32 << 10
# Sends take turns, a segment to each reducer, and slow links may have little more than this in
# flight (group/context.py). With longer turns half of the reducers' links stand idle: 8 workers and
# 8 servers at 400 Mbit/s took 1.40 times as long as 100 MiB on the link with 1 MiB in a turn, 1.05
# times with 256 KiB, and no less with 128 KiB, in more messages.
_TURN_BYTES: Final = 256 << 10

Layout = tuple[list[int], list[int]]
"""The offset and the length of every chunk of one buffer, in bytes."""

_EMPTY: Final[Layout] = ([], [])


class Shape(NamedTuple):
    """A kind of call; calls of one kind share one plan.

    Args:
        collective: a key of `COLLECTIVES`, or `MESSAGE`; `algorithm` a name that `find` knows.
        n_elems: the elements of the in-place buffer, or of one rank's block (all_gather,
            reduce_scatter, gather, scatter, all_to_all).
        root: the root, or the peer of a send or recv (-1: any); else 0.
        hosts: the host of every rank, numbered from 0 in order of first appearance.
        blocks: the elements of every rank's block if these differ (all_gather, reduce_scatter);
            `n_elems` is 0 then.
        sent, taken: the elements of the blocks that this rank sends to and receives from every
            rank, if these differ (all_to_all); `n_elems` is 0 then.
        codec: the encoding of elements between hosts.
        n_lanes: the number of channels that segments use, see `Plan::n_lanes`.
        rounds_own: a reducer rounds its own part like the parts that it receives, so the bits do
            not depend on the reducer. Only with a narrow codec and a host for each rank.
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

    @property
    def found(self) -> Algorithm:
        """The algorithm, fitted to buffers of this length."""
        algorithm = schedule.find(self.collective, self.algorithm)
        return algorithm.fitted(self.n_elems * self.dtype.n_bytes, self.size)

    @property
    def segment_bytes(self) -> int:
        """The length of a segment in memory; the same on every rank."""
        algorithm = self.found
        if not algorithm.scatters or len(set(self.hosts)) < self.size:
            return SEGMENT_BYTES
        n_chunks = algorithm.n_chunks(self.size, self.hosts)
        chunk = self.n_elems * self.dtype.n_bytes // n_chunks
        of_turn = _TURN_BYTES / self.codec.share / n_chunks
        least = _LEAST_SEGMENT_BYTES / self.codec.share
        wanted = int(max(least, min(chunk / _SEGMENTS_OF_CHUNK, of_turn)))
        return min(SEGMENT_BYTES, 1 << (wanted.bit_length() - 1))

    @property
    def n_workers(self) -> int:
        """The number of ranks with a tensor; servers have none and the highest ranks."""
        return self.size - self.found.n_servers

    @property
    def agrees_by_pair(self) -> bool:
        """True if only the two ranks that exchange a block know its length."""
        row = COLLECTIVES.get(self.collective)
        return row is not None and row.by_pair and self.found.takes_uneven


def agreement(shape: Shape) -> str:
    """Return the text that every rank of a call must agree on.

    It is the same for a send and its receive; the key of a message pairs them.
    """
    if shape.collective == MESSAGE:
        return f"message {shape.dtype}[{shape.n_elems}]"
    return describe(shape)


def describe(shape: Shape) -> str:
    """Describe a call for people."""
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
    narrow = "" if not shape.codec.is_narrow else f", in {shape.codec} between hosts"
    narrow += ", own parts rounded too" if shape.rounds_own else ""
    lanes = "" if shape.n_lanes == 1 else f", over {shape.n_lanes} channels"
    return f"{what} by {shape.algorithm}{narrow}{lanes}"


def layouts_of(shape: Shape) -> list[Layout]:
    """Return the layouts of DATA, INPUT, OUTPUT and SCRATCH."""
    item, size, algorithm = shape.dtype.n_bytes, shape.size, shape.found
    row = COLLECTIVES.get(shape.collective)
    if row is None or row.in_place:
        data = cut(algorithm, shape.n_elems, item, size, shape.hosts, shape.codec.block)
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


def scratch_first_of(shape: Shape) -> list[int]:
    """Return, by scratch chunk, the index of its first element in the call's buffer."""
    row = COLLECTIVES.get(shape.collective)
    if shape.codec.block == 1 or row is None or not row.in_place:
        return []  # not needed
    item, algorithm = shape.dtype.n_bytes, shape.found
    begins, _ = cut(algorithm, shape.n_elems, item, shape.size, shape.hosts, shape.codec.block)
    like = algorithm.scratch(shape.rank, shape.size, shape.hosts, shape.root)
    return [begins[chunk] // item for chunk in like]


def _blocks(shape: Shape, which: Blocks, lengths: list[int]) -> Layout:
    """The layout of the blocks that this rank has in a buffer."""
    if which is Blocks.OWN:
        return [0], [lengths[shape.rank]]
    has_all = which is Blocks.ALL or (which is Blocks.AT_ROOT and shape.rank == shape.root)
    return _consecutive(lengths) if has_all else _EMPTY


def _consecutive(lengths: list[int]) -> Layout:
    """The layout of chunks that follow one another."""
    return list(itertools.accumulate(lengths, initial=0))[:-1], lengths


def _scratch(lengths: Sequence[int], like: Sequence[int]) -> Layout:
    """The layout of scratch chunks as long as the chunks `like`, each on its own cache lines."""
    n_bytes = [lengths[chunk] for chunk in like]
    strides = [-(-n // LINE_BYTES) * LINE_BYTES for n in n_bytes]
    return list(itertools.accumulate(strides, initial=0))[:-1], n_bytes


def cut(
    algorithm: Algorithm,
    n_elems: int,
    item: int,
    size: int,
    hosts: Sequence[int] = (),
    block: int = 1,
) -> Layout:
    """Return the layout of a buffer that is reduced or sent in place.

    Args:
        block: chunks begin at multiples of this many elements, see `Codec`.
    """
    if algorithm.cut_rule:
        return algorithm.cut_rule(n_elems * item, size, unit_of(block, item))
    return balanced(n_elems, item, algorithm.n_chunks(size, hosts), block)


def unit_of(block: int, item: int) -> int:
    """Return the unit of chunk lengths, in bytes: each is a multiple of it."""
    return max(LINE_BYTES, block * item)


def balanced(n_elems: int, item: int, n_chunks: int, block: int = 1) -> Layout:
    """Return a layout of chunks of equal length; the last ones may be shorter or empty."""
    if n_chunks == 1:
        return [0], [n_elems * item]
    stride = stride_of(n_elems * item, n_chunks, unit_of(block, item)) // item
    begins = [min(chunk * stride, n_elems) for chunk in range(n_chunks + 1)]
    lengths = [(end - begin) * item for begin, end in itertools.pairwise(begins)]
    return [begin * item for begin in begins[:-1]], lengths
