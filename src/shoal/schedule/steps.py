"""The schedule language: the work of one rank as a sequence of steps.

A step names chunks of buffers and, where it communicates, one peer. Steps of a rank are ordered
only through the chunks they touch, in the order in which they are yielded:

- a step that reads a chunk waits for the step that wrote it last;
- a step that writes a chunk waits for the one that wrote it last and for everything that still
  reads it. A posted Send reads its chunk until it is done;
- so folds into one chunk happen in the order of the steps, whatever arrives first.

Every chunk is cut into segments, and these rules hold for each segment on its own, so every
schedule is pipelined. The k-th Send from rank a to rank b meets the k-th Recv of b from a.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias, TypeVar

from shoal.errors import UsageError

_AnyStep = TypeVar("_AnyStep", bound="_Step")


class Buffer(enum.IntEnum):
    """The memory a step may name, with the same numbers as in the native program."""

    DATA = 0
    """The caller's tensor, input and output in one."""
    INPUT = 1
    """The caller's input, if it is separate from the output. Never written."""
    OUTPUT = 2
    """The caller's output, if it is separate from the input."""
    SCRATCH = 3
    """The engine's own memory: chunks as long as the longest chunk of the collective."""


# NOT dataclasses: creating one takes a millisecond, on every rank, before the first call.
class _Step:
    """A value: equal to a step of the same class with the same fields. Never changed."""

    __slots__: tuple[str, ...] = ()

    def replace(self: _AnyStep, **changes: Any) -> _AnyStep:
        """Return a copy with some fields changed."""
        return type(self)(**{name: getattr(self, name) for name in self.__slots__} | changes)

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        return f"<{self}>"


class Send(_Step):
    """Send one chunk to `peer`. Reads the chunk until it has left."""

    __slots__ = ("buffer", "chunk", "peer")

    def __init__(self, peer: int, chunk: int, buffer: Buffer = Buffer.DATA) -> None:
        self.peer, self.chunk, self.buffer = peer, chunk, buffer
        if peer < 0 or chunk < 0:
            raise UsageError(f"{self}: peer and chunk count from 0")

    def __str__(self) -> str:
        return f"send {self.buffer.name}[{self.chunk}] to {self.peer}"


class Recv(_Step):
    """Receive one chunk from `peer`: store it, or fold it into the value held there."""

    __slots__ = ("buffer", "chunk", "fold", "peer")

    def __init__(
        self, peer: int, chunk: int, fold: bool = False, buffer: Buffer = Buffer.DATA
    ) -> None:
        self.peer, self.chunk, self.fold, self.buffer = peer, chunk, fold, buffer
        if peer < 0 or chunk < 0:
            raise UsageError(f"{self}: peer and chunk count from 0")

    def __str__(self) -> str:
        verb = "fold" if self.fold else "store"
        return f"{verb} {self.buffer.name}[{self.chunk}] from {self.peer}"


class Copy(_Step):
    """Copy chunk `chunk` of `buffer` into chunk `into` of `into_buffer`, or fold it in there."""

    __slots__ = ("buffer", "chunk", "fold", "into", "into_buffer")

    def __init__(
        self,
        chunk: int,
        into: int,
        buffer: Buffer = Buffer.DATA,
        into_buffer: Buffer = Buffer.SCRATCH,
        fold: bool = False,
    ) -> None:
        self.chunk, self.into, self.fold = chunk, into, fold
        self.buffer, self.into_buffer = buffer, into_buffer
        if chunk < 0 or into < 0:
            raise UsageError(f"{self}: chunks count from 0")
        if (buffer, chunk) == (into_buffer, into):
            raise UsageError(f"{self}: a chunk cannot be copied onto itself")

    def __str__(self) -> str:
        verb, source = "fold" if self.fold else "copy", f"{self.buffer.name}[{self.chunk}]"
        return f"{verb} {source} into {self.into_buffer.name}[{self.into}]"


class Finish(_Step):
    """Declare that a chunk is now folded over all ranks.

    The engine applies AVG's division here, so a value passes through exactly one Finish, however
    many ranks it is sent to afterwards.
    """

    __slots__ = ("buffer", "chunk")

    def __init__(self, chunk: int, buffer: Buffer = Buffer.DATA) -> None:
        self.chunk, self.buffer = chunk, buffer
        if chunk < 0:
            raise UsageError(f"{self}: chunks count from 0")

    def __str__(self) -> str:
        return f"finish {self.buffer.name}[{self.chunk}]"


Step: TypeAlias = Send | Recv | Copy | Finish
