"""Turns schedules into native programs and plans, and native errors into exceptions.

Only this module and `limits` import the native core; other modules import its names from here. The
code below runs once per kind of call; the code that runs on every call is native.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal import schedule
from shoal._native import (
    HANDSHAKE_MAGIC,
    HANDSHAKE_VERSION,
    N_NONCE_BYTES,
    Arena,
    Call,
    Countdown,
    Endpoint,
    Fault,
    Hello,
    Mesh,
    Peer,
    Plan,
    Program,
    ProgramBuilder,
    Progress,
    address_of,
    allocate,
    can_fold,
    fold_isa,
    n_waiting,
    note_signal,
    pair_key,
    release,
    stream_copy,
    wakeups,
)
from shoal._native import Group as NativeGroup
from shoal._native import can_encode as _can_encode
from shoal._native import round_to as _round_to
from shoal.dtypes import DType, Op
from shoal.errors import Closed, InternalError, PeerLost, ShoalError, TimedOut, UsageError
from shoal.schedule import Buffer, Copy, Finish, Recv, Send, Step
from shoal.shapes import Shape, agreement, describe, layouts_of, scratch_first_of

if TYPE_CHECKING:
    from shoal.codec import Codec
    from shoal.schedule import Algorithm


def lower(steps: Iterable[Step], size: int, *, finish: bool = True) -> Program:
    """Flatten one rank's steps; the native core derives the dependencies between them.

    `finish` keeps Finish steps, which are needed to divide an average or round to a narrow codec.
    """
    builder = ProgramBuilder.of(size)
    for step in steps:
        if isinstance(step, Send):
            builder.send(step.peer, step.chunk, step.buffer)
        elif isinstance(step, Recv):
            builder.recv(step.peer, step.chunk, step.fold, step.buffer)
        elif isinstance(step, Copy):
            builder.copy(step.chunk, step.into, step.buffer, step.into_buffer, step.fold)
        elif finish:
            builder.finish(step.chunk, step.buffer)
    return builder.done()


# Plans are small; a model has a few dozen kinds of calls. A shape that changes every step (variable
# batches) must not grow this without bound.
@functools.lru_cache(maxsize=1024)
def plan_for(shape: Shape, n_workers: int = 0) -> Plan:
    """Return the native plan of a kind of call: its program, chunk layout and descriptor.

    Args:
        n_workers: the rank of the first server; 0 if there are no servers.
    """
    return make_plan(shape, n_workers)


def make_plan(shape: Shape, n_workers: int = 0) -> Plan:
    """Make the plan without the cache, for lengths that are unlikely to repeat."""
    average = shape.op is Op.AVG
    kind = shape._replace(n_elems=0, dtype=DType.UINT8, blocks=(), sent=(), taken=(), n_lanes=1)
    program = _program_for(kind._replace(op=shape.op if average else Op.SUM), shape.found)
    return _plan_of(shape, program, n_workers or shape.n_workers, n_workers=n_workers)


@functools.lru_cache(maxsize=1024)
def plan_among(
    shape: Shape, members: tuple[int, ...], size: int, what: str, after_fold: bool | None = None
) -> Plan:
    """Return the plan of an all-reduce of some ranks of a larger native group.

    Args:
        shape: as in a group of these ranks alone.
        members: their ranks in the larger group, which has `size` ranks.
        what: a name for messages; ranks must agree on it.
        after_fold: False: only the steps until each chunk is folded at its owner; True: only the
            steps after that, with an average over all ranks of the larger group; None: all steps.
    """
    steps = shape.found.steps(shape.rank, shape.size, 0, shape.hosts)
    if after_fold is not None:
        every = list(steps)
        cut = next((at for at, step in enumerate(every) if isinstance(step, Finish)), len(every))
        steps = iter(every[cut:] if after_fold else every[:cut])
    first = {Buffer.DATA: 0, Buffer.SCRATCH: 0}
    finish = shape.op is Op.AVG or shape.codec.is_narrow
    program = lower((schedule.moved(step, members, first) for step in steps), size, finish=finish)
    return _plan_of(shape, program, size, what=f", {what}")


def _plan_of(
    shape: Shape, program: Program, n_averaged: int, *, n_workers: int = 0, what: str = ""
) -> Plan:
    average = shape.op is Op.AVG
    plan = Plan.make(
        program=program,
        layouts=layouts_of(shape),
        dtype=shape.dtype,
        op=Op.SUM if average else shape.op,
        divisor=n_averaged if average else 1,
        codec=shape.codec.number,
        keep=shape.codec.keep,
        scratch_first=scratch_first_of(shape),
        descriptor=describe(shape) + what,
        agreement=agreement(shape) + what,
        by_pair=shape.agrees_by_pair,
        n_lanes=shape.n_lanes,
        n_workers=n_workers,
        segment_bytes=shape.segment_bytes,
        rounds_own=shape.rounds_own,
    )
    plan.tensor_bytes = shape.n_elems * shape.dtype.n_bytes
    return plan


@functools.lru_cache(maxsize=256)
def _program_for(kind: Shape, algorithm: Algorithm) -> Program:
    """Return the program of all calls that differ only in size and type, and are cut equally."""
    # A receive from any source is lowered as one from rank 0: the engine fills in the real source.
    steps = algorithm.steps(kind.rank, kind.size, max(kind.root, 0), kind.hosts)
    return lower(steps, kind.size, finish=kind.op is Op.AVG or kind.codec.is_narrow)


def can_encode(codec: Codec, dtype: DType, op: Op) -> bool:
    """Return True if a narrow codec can carry folds of this type and operation."""
    return _can_encode(codec.number, dtype, op)


def round_to(
    codec: Codec, dtype: DType, address: int, n_elems: int, *, seed: int = 0, first: int = 0
) -> None:
    """Round elements in place, in the caller's memory, to values that a narrow codec can carry.

    Rounds to nearest with seed 0, else at random by the seed and the index of the first element.
    ValueError if the codec cannot carry this type.
    """
    _round_to(codec.number, codec.keep, dtype, address, n_elems, seed, first)


class RankInfo(NamedTuple):
    """A rank's host name, the address at which peers reached it, and its host's identity.

    `process_id`: 32 random hexadecimal digits that its process chose for this epoch.
    """

    host: str
    address: str
    host_id: str
    process_id: str = ""

    def __str__(self) -> str:
        return f"{self.host}, {self.address}" if self.address else self.host


_KINDS: Final[Mapping[Fault, type[ShoalError]]] = {
    Fault.TIMED_OUT: TimedOut,
    Fault.MISMATCH: UsageError,
    Fault.CLOSED: Closed,
    Fault.RESOURCE: ShoalError,
}


def error_from(
    native: tuple[Fault, int, str, str], members: Sequence[int], names: Sequence[RankInfo]
) -> ShoalError | None:
    """Return the exception for a native error, or None for no error.

    `native` is (fault, mesh rank to blame, event, call in which it happened).
    """
    fault, peer, what, doing = native
    if fault is Fault.NONE:
        return None
    if fault is Fault.PEER_LOST:
        rank = members.index(peer) if peer in members else -1
        host, address, *_ = names[peer] if 0 <= peer < len(names) else ("", "")
        return PeerLost(rank, host, address, doing, what)
    message = f"{doing}: {what}" if doing else what
    return _KINDS.get(fault, InternalError)(message)
