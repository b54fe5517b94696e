"""Turns schedules into native programs and plans, and native errors into exceptions.

The only module that imports the native core. Everything here runs once per kind of call; what
runs on every call is native.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shoal._native import (
    Arena,
    Call,
    Mesh,
    Plan,
    Program,
    address_of,
    after_fork_in_child,
    after_fork_in_parent,
    allocate,
    before_fork,
    can_fold,
    fold_isa,
    n_waiting,
    release,
    scale,
)
from shoal._native import (
    Group as NativeGroup,
)
from shoal.dtypes import DType, Op, item_size
from shoal.errors import Closed, InternalError, PeerLost, ShoalError, TimedOut, UsageError
from shoal.schedule import Buffer, Copy, Finish, Recv, Send, Step, find

__all__ = [
    "Arena",
    "Call",
    "Mesh",
    "NativeGroup",
    "Plan",
    "Seat",
    "Shape",
    "address_of",
    "after_fork_in_child",
    "after_fork_in_parent",
    "allocate",
    "n_waiting",
    "before_fork",
    "can_fold",
    "describe",
    "error_from",
    "fold_isa",
    "lower",
    "plan_for",
    "release",
    "scale",
]

_SEND, _RECV, _COPY, _FINISH = range(4)

# The unit of pipelining. Two segments and what they are folded into fit in a core's L2; smaller
# ones cost more messages. At most a slot of the arena (native/engine/slots.h).
SEGMENT_BYTES: Final = 128 << 10

# Chunks begin on cache lines, so that no two ranks write to the same one.
_LINE_BYTES: Final = 64

_Place = tuple[Buffer, int]
_Row = tuple[int, bool, int, int, int, int, int, int, list[int]]


def lower(steps: Iterable[Step], size: int, *, finish: bool = True) -> Program:
    """Flatten one rank's steps, with the dataflow between them made explicit.

    Args:
        size: of the group; peers are below it.
        finish: keep the Finish steps; they do nothing unless the operation divides.
    """
    flow = _Dataflow()
    for step in steps:
        if finish or not isinstance(step, Finish):
            flow.add(step)
    return Program.make(size, flow.rows)


class _Dataflow:
    """Which earlier steps each step waits for: its chunk's last writer, or that one's readers."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._writer: dict[_Place, int] = {}
        self._readers: dict[_Place, list[int]] = {}
        self._values: dict[tuple[_Place, int], int] = {}

    def add(self, step: Step) -> None:
        here = (step.buffer, step.chunk)
        if isinstance(step, Send):
            # Sends of one value may share one copy of it; a value is known by who wrote it.
            key = (here, self._writer.get(here, -1))
            value = self._values.setdefault(key, len(self._values))
            waits_for = self._read(here)
            row = (_SEND, False, step.buffer, 0, step.peer, step.chunk, 0, value, waits_for)
        elif isinstance(step, Recv):
            waits_for = self._write(here)
            row = (_RECV, step.fold, step.buffer, 0, step.peer, step.chunk, 0, 0, waits_for)
        elif isinstance(step, Copy):
            waits_for = sorted({*self._read(here), *self._write((step.into_buffer, step.into))})
            into = step.into_buffer
            row = (_COPY, step.fold, step.buffer, into, -1, step.chunk, step.into, 0, waits_for)
        else:
            row = (_FINISH, False, step.buffer, 0, -1, step.chunk, 0, 0, self._write(here))
        self.rows.append(row)

    def _read(self, place: _Place) -> list[int]:
        self._readers.setdefault(place, []).append(len(self.rows))
        return [self._writer[place]] if place in self._writer else []

    def _write(self, place: _Place) -> list[int]:
        writer = [self._writer[place]] if place in self._writer else []
        self._writer[place] = len(self.rows)
        return self._readers.pop(place, None) or writer


class Shape(NamedTuple):
    """Everything that makes two calls the same kind: they share one plan.

    Args:
        collective: a key of `ALGORITHMS`; `algorithm` one of its names.
        n_elems: of the in-place buffer, or of one rank's block (all_gather, reduce_scatter).
        root: a broadcast's source, or the peer of a send or recv; else 0.
        hosts: the host of every rank, numbered in the order in which they first come up.
        title: what users call it, for messages ("barrier"); empty: the collective's name.
    """

    collective: str
    algorithm: str
    dtype: DType
    op: Op
    n_elems: int
    rank: int
    size: int
    root: int = 0
    title: str = ""
    hosts: tuple[int, ...] = ()


# Plans are small; a model has a few dozen kinds of calls. A shape that changes every step (variable
# batches) must not grow this without bound.
@functools.lru_cache(maxsize=1024)
def plan_for(shape: Shape) -> Plan:
    """The native plan of a kind of call: its program, chunk layout and descriptor."""
    average = shape.op is Op.AVG
    program = _program_for(shape._replace(n_elems=0, dtype=DType.UINT8, title=""))
    layouts = _layouts(shape)
    return Plan.make(
        program=program,
        layouts=layouts,
        dtype=shape.dtype,
        op=Op.SUM if average else shape.op,
        divisor=shape.size if average else 1,
        segment_bytes=SEGMENT_BYTES,
        descriptor=describe(shape),
    )


@functools.lru_cache(maxsize=256)
def _program_for(kind: Shape) -> Program:
    """The program of all calls that differ in size and type only."""
    algorithm = find(kind.collective, kind.algorithm)
    steps = algorithm.steps(kind.rank, kind.size, kind.root, kind.hosts)
    return lower(steps, kind.size, finish=kind.op is Op.AVG)


_REDUCING: Final = frozenset({"all_reduce", "reduce_scatter"})


def describe(shape: Shape) -> str:
    """What a call does, in the words that every rank must agree on.

    A send and its receive say the same; so do all ranks of a broadcast.
    """
    what = f"{shape.title or shape.collective} {shape.dtype}[{shape.n_elems}]"
    if shape.collective in _REDUCING and not shape.title:
        what += f" {shape.op}"
    if shape.collective == "broadcast":
        what += f" from rank {shape.root}"
    if shape.collective == "send_recv":
        ends = (shape.rank, shape.root) if shape.algorithm == "send" else (shape.root, shape.rank)
        return f"{what} from rank {ends[0]} to rank {ends[1]}"
    return f"{what} by {shape.algorithm}"


def _layouts(shape: Shape) -> list[tuple[list[int], list[int]]]:
    """Offset and bytes of every chunk, by buffer."""
    algorithm = find(shape.collective, shape.algorithm)
    like = algorithm.scratch(shape.rank, shape.size, shape.hosts, shape.root)
    item = item_size(shape.dtype)
    block = shape.n_elems * item
    empty: tuple[list[int], list[int]] = ([], [])
    whole = ([0], [block])
    blocks = ([rank * block for rank in range(shape.size)], [block] * shape.size)
    match shape.collective:
        case "all_gather":
            return [empty, whole, blocks, _scratch(blocks[1], like)]
        case "reduce_scatter":
            return [empty, blocks, whole, _scratch(blocks[1], like)]
        case _:
            n_chunks = algorithm.n_chunks(shape.size, shape.hosts)
            data = _balanced(shape.n_elems, item, n_chunks)
            return [data, empty, empty, _scratch(data[1], like)]


def _scratch(lengths: Sequence[int], like: Sequence[int]) -> tuple[list[int], list[int]]:
    """Scratch chunks as long as the chunks they are `like`, each on cache lines of its own."""
    n_bytes = [lengths[chunk] for chunk in like]
    strides = [-(-n // _LINE_BYTES) * _LINE_BYTES for n in n_bytes]
    return list(itertools.accumulate(strides, initial=0))[:-1], n_bytes


def _balanced(n_elems: int, item: int, n_chunks: int) -> tuple[list[int], list[int]]:
    """Chunks of equal length but for the last ones, which may be shorter or empty."""
    if n_chunks == 1:
        return [0], [n_elems * item]
    line = max(1, _LINE_BYTES // item)
    stride = -(-n_elems // n_chunks)
    stride = -(-stride // line) * line
    begins = [min(chunk * stride, n_elems) for chunk in range(n_chunks + 1)]
    lengths = [(end - begin) * item for begin, end in itertools.pairwise(begins)]
    return [begin * item for begin in begins[:-1]], lengths


class Seat(NamedTuple):
    """Where a rank is: its host's name, the address it was reached at, and the host's identity."""

    host: str
    address: str
    host_id: str

    def __str__(self) -> str:
        return f"{self.host}, {self.address}" if self.address else self.host


def error_from(
    native: tuple[int, int, str, str], members: Sequence[int], names: Sequence[Seat]
) -> ShoalError | None:
    """The exception that a native error stands for, or None.

    Args:
        native: (fault, mesh rank to blame, what happened, during which call).
        members: mesh ranks by group rank.
        names: by mesh rank.
    """
    fault, peer, what, doing = native
    if fault == 0:
        return None
    if fault == 1:
        rank = members.index(peer) if peer in members else -1
        host, address, _ = names[peer] if 0 <= peer < len(names) else ("", "", "")
        return PeerLost(rank, host, address, doing, what)
    message = f"{doing}: {what}" if doing else what
    kinds = {2: TimedOut, 3: UsageError, 4: Closed, 5: ShoalError}
    return kinds.get(fault, InternalError)(message)
