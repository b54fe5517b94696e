"""The group in which the pool threads of all workers communicate, and no other threads.

Rank 0 sends commands as messages. Apart from these, all threads make the same calls in the same
order. Calls have no deadline, and end with the workers' group at the latest; calls that mend a call
have its deadline.
"""

from __future__ import annotations

import array
import enum
import os
import select
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import DType, Op
from shoal.engine import make_plan
from shoal.group.context import hash_of
from shoal.group.group import Group
from shoal.group.work import FOR_EVER_S
from shoal.plan import Planner
from shoal.shapes import Shape

if TYPE_CHECKING:
    from shoal.engine import RankInfo
    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.served_call import NativeError
    from shoal.group.work import Work

_COMMAND, _HELLO = 1, 2  # tags of messages
_FORMAT: Final = struct.Struct("<BxxxxxxxQ")  # of a command


class Bell:
    """An eventfd that the native core and other threads ring.

    Threads: one opens it and waits; any may ring.
    """

    def __init__(self) -> None:
        self.fd = -1  # owned by the bell; -1 before `open`
        self._poll = select.poll()

    def open(self) -> None:
        """Get the descriptor, or raise OSError; earlier rings are lost."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self.fd, select.POLLIN)

    def ring(self) -> None:
        """Wake the waiting thread, or make the next wait return at once."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, for at most this time."""
        if self._poll.poll(1e3 * timeout_s):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        # NOT sooner: a late `ring` must not write to another file with this number.
        if self.fd >= 0:
            os.close(self.fd)


class What(enum.IntEnum):
    """The verb of a command to the workers about a view."""

    FORM = 1
    """Form it; rank 0 then broadcasts its servers."""
    END = 2
    """End it once its calls have ended."""
    LOSE = 3
    """End it at once, since one of its servers is lost."""


class Command(NamedTuple):
    """A command of rank 0 that all workers carry out."""

    what: What
    view: int


def encode(command: Command) -> bytes:
    """Return the command in `_FORMAT.size` bytes."""
    return _FORMAT.pack(*command)


def decode(data: bytes) -> Command:
    """Return the command that `encode` wrote; ValueError for anything else."""
    what, view = _FORMAT.unpack(data)
    return Command(What(what), view)


class Control(Group):
    """The control group of the workers along one rail."""

    @classmethod
    def of(cls, group: Group, rail: Rail) -> Control:
        """Return the control group of this rank's rail in `group`."""
        title = f"{group.name} (rail {rail.place})" if rail.n_rails > 1 else group.name
        planner = Planner(rail.cluster_of(group.planner.cluster))  # a new one logs no choices
        members = [group._members[rank] for rank in rail.members]
        # From the number of `group`: ranks may begin two groups of one name in different orders.
        native_id = hash_of("pool control", group.native_id, rail.place)
        return cls(
            *(group._context, members, f"{title}/pool control", FOR_EVER_S, planner),
            native_id=native_id,
        )

    @property
    def epoch(self) -> int:
        """The random number of its mesh, the same on all workers."""
        return self._context.epoch

    @property
    def ranks(self) -> list[RankInfo]:
        return [self._context.names[member] for member in self._members]

    def native_error(self) -> NativeError:
        """Return the native error that ended the group."""
        return self._native.error()

    def notify(self, bell: Bell) -> None:
        """Ring the bell when a command arrives, and when the group ends."""
        self._native.notify(bell.fd)

    def greet(self) -> None:
        """Have every other rank connect to rank 0: of two ranks, the higher one dials.

        Otherwise rank 0 would have to ask for the connection, which takes 50 ms.
        """
        for rank in range(1, self.size) if self.rank == 0 else ():
            self.recv(bytearray(1), rank, _HELLO, async_op=True)
        if self.rank:
            self.send(bytearray(1), 0, _HELLO, async_op=True)

    def send_command(self, command: Command) -> None:
        """Send a command to all other ranks; busy or stopped ranks receive it too."""
        for rank in range(1, self.size):
            self.send(bytearray(encode(command)), rank, _COMMAND, async_op=True)

    def next_command(self) -> Command | None:
        """Return the next command of rank 0; None if no command has arrived."""
        if not self._native.has_message(0, _COMMAND):
            return None
        data = bytearray(_FORMAT.size)
        self.recv(data, 0, _COMMAND)
        return decode(bytes(data))

    def most(self, value: int) -> int:
        """Return the highest `value` of all workers."""
        data = array.array("q", [value])
        self.all_reduce(data, Op.MAX)
        return data[0]

    def bytes_of_all(self, data: bytes, timeout_s: float, subject: int = 0) -> list[bytes]:
        """Return the bytes of each worker; the length and subject are the same on all workers."""
        n = len(data)
        found = bytearray(n * self.size)
        self.all_gather(found, bytearray(data), timeout_s=timeout_s, subject=subject)
        return [bytes(found[rank * n : (rank + 1) * n]) for rank in range(self.size)]

    def all_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each worker, which may differ in length."""
        longest = self.most(len(data))
        padded = len(data).to_bytes(4, "little") + data.ljust(longest, b"\0")
        found = self.bytes_of_all(padded, FOR_EVER_S)
        return [each[4 : 4 + int.from_bytes(each[:4], "little")] for each in found]

    def from_lowest(self, data: bytes) -> bytes:
        """Return the bytes of rank 0."""
        length = array.array("q", [len(data)])
        self.broadcast(length)
        found = bytearray(data if self.rank == 0 else bytes(length[0]))
        if found:
            self.broadcast(found)
        return bytes(found)

    def start_broadcast(self, data: BufferView, root: int, timeout_s: float) -> Work:
        """Overwrite `data` with the data of rank `root`; the caller keeps the memory alive."""
        work = self.broadcast(data, root, timeout_s=timeout_s, async_op=True)
        assert work is not None
        return work

    def fold_at(self, blocks: Sequence[BufferView], dtype: DType, op: Op, timeout_s: float) -> Work:
        """Fold block r of every rank, from rank r downwards, into rank r's own block r.

        Blocks may be empty.
        """
        lengths = tuple(block.n_elems for block in blocks)
        shape = Shape(
            *("reduce_scatter", "direct", dtype, op, 0, self.rank, self.size),
            hosts=tuple(range(self.size)),
            blocks=lengths,
        )
        how: CallOptions = {"timeout_s": timeout_s, "async_op": True}
        work = self._start_between(make_plan(shape), blocks, (blocks[self.rank],), how)
        assert work is not None
        return work
