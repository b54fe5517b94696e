"""Turns schedules into native programs and plans, and native errors into exceptions.

The only module that imports the native core; what others use of it as it is (the handshake, memory)
passes through. Everything else here runs once per kind of call; what
runs on every call is native.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shoal._native import (
    HANDSHAKE_MAGIC,
    HANDSHAKE_VERSION,
    N_NONCE_BYTES,
    Arena,
    Call,
    ClientHandshake,
    Hello,
    Mesh,
    Plan,
    Program,
    Progress,
    ServerHandshake,
    address_of,
    allocate,
    can_encode,
    can_fold,
    fold_isa,
    n_waiting,
    note_signal,
    pair_key,
    release,
    scale,
    wakeups,
)
from shoal._native import (
    Group as NativeGroup,
)
from shoal.codec import Codec
from shoal.dtypes import DType, Op, item_size
from shoal.errors import Closed, InternalError, PeerLost, ShoalError, TimedOut, UsageError
from shoal.schedule import Algorithm, Buffer, Copy, Finish, Recv, Send, Step
from shoal.shapes import SEGMENT_BYTES, Shape, agreement, describe, layouts_of

__all__ = [
    "Arena",
    "Call",
    "ClientHandshake",
    "HANDSHAKE_MAGIC",
    "HANDSHAKE_VERSION",
    "Hello",
    "N_NONCE_BYTES",
    "Progress",
    "ServerHandshake",
    "pair_key",
    "Mesh",
    "NativeGroup",
    "Plan",
    "Seat",
    "TIMED_OUT",
    "address_of",
    "allocate",
    "n_waiting",
    "can_encode",
    "note_signal",
    "can_fold",
    "error_from",
    "fold_isa",
    "lower",
    "make_plan",
    "plan_for",
    "release",
    "rows_of",
    "scale",
    "wakeups",
]

TIMED_OUT: Final = 2
"""The native fault of a deadline that passed."""

_SEND, _RECV, _COPY, _FINISH = range(4)

_Place = tuple[Buffer, int]
Row = tuple[int, bool, int, int, int, int, int, int, list[int]]
"""A step as the native core takes it: kind (send, recv, copy, finish), whether it folds, buffer,
the buffer copied into, peer, chunk, the chunk copied into, version of what is sent, and the steps
it waits for."""


def lower(steps: Iterable[Step], size: int, *, finish: bool = True) -> Program:
    """Flatten one rank's steps, with the dataflow between them made explicit.

    Args:
        size: of the group; peers are below it.
        finish: keep the Finish steps; they do nothing unless the operation divides, or a narrow
            codec rounds the result.
    """
    return Program.make(size, rows_of(steps, finish=finish))


def rows_of(steps: Iterable[Step], *, finish: bool = True) -> list[Row]:
    """What `lower` hands to the native core; `native/test/programs.txt` is written from it."""
    flow = _Dataflow()
    for step in steps:
        if finish or not isinstance(step, Finish):
            flow.add(step)
    return flow.rows


class _Dataflow:
    """Which earlier steps each step waits for: its chunk's last writer, or that one's readers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
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


# Plans are small; a model has a few dozen kinds of calls. A shape that changes every step (variable
# batches) must not grow this without bound.
@functools.lru_cache(maxsize=1024)
def plan_for(shape: Shape) -> Plan:
    """The native plan of a kind of call: its program, chunk layout and descriptor."""
    return make_plan(shape)


def make_plan(shape: Shape) -> Plan:
    """`plan_for` a kind of call that will hardly come again: nothing of its lengths is kept."""
    average = shape.op is Op.AVG
    kind = shape._replace(n_elems=0, dtype=DType.UINT8, blocks=(), sent=(), taken=(), n_stripes=1)
    return Plan.make(
        program=_program_for(kind._replace(op=shape.op if average else Op.SUM), shape.found),
        layouts=layouts_of(shape),
        dtype=shape.dtype,
        op=Op.SUM if average else shape.op,
        divisor=shape.size if average else 1,
        codec=shape.codec,
        segment_elems=SEGMENT_BYTES // item_size(shape.dtype),
        descriptor=describe(shape),
        agreement=agreement(shape),
        by_pair=shape.agrees_by_pair,
        n_stripes=shape.n_stripes,
    )


@functools.lru_cache(maxsize=256)
def _program_for(kind: Shape, algorithm: Algorithm) -> Program:
    """The program of all calls that differ in size and type only, and are cut alike."""
    # A receive from any source is lowered as one from rank 0: the engine puts in who it was.
    steps = algorithm.steps(kind.rank, kind.size, max(kind.root, 0), kind.hosts)
    return lower(steps, kind.size, finish=kind.op is Op.AVG or kind.codec is not Codec.IDENTITY)


class Seat(NamedTuple):
    """Where a rank is: its host's name, the address it was reached at, and the host's identity.

    `process_id`: 32 hexadecimal digits, drawn by its process for this epoch.
    """

    host: str
    address: str
    host_id: str
    process_id: str = ""

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
        host, address, *_ = names[peer] if 0 <= peer < len(names) else ("", "")
        return PeerLost(rank, host, address, doing, what)
    message = f"{doing}: {what}" if doing else what
    kinds = {TIMED_OUT: TimedOut, 3: UsageError, 4: Closed, 5: ShoalError}
    return kinds.get(fault, InternalError)(message)
