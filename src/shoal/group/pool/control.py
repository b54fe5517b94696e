"""The group in which the pool threads of all workers, and no others, communicate.

Rank 0 sends commands as messages. Else all threads make the same calls in the same order. No call
has a deadline, except those that mend a call with one: the others end with the workers' group at
the latest.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.dtypes import DType, Op
from shoal.engine import Fault, make_plan
from shoal.group.calls import ClosedGroup
from shoal.group.context import hash_of
from shoal.group.group import Group
from shoal.group.pool.commands import N_BYTES, Command, decode, encode
from shoal.group.work import FOR_EVER_S
from shoal.plan import Planner
from shoal.shapes import Shape

if TYPE_CHECKING:
    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.bell import Bell
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.served_call import NativeError
    from shoal.group.work import Work

_TAG: Final = 1  # of commands


class Control(Group):
    """The control group of the workers along one rail."""

    @classmethod
    def of(cls, group: Group, rail: Rail) -> Control:
        """Return the control group of this rank's rail in `group`."""
        title = f"{group.name} (rail {rail.place})" if rail.n_rails > 1 else group.name
        planner = Planner(rail.cluster_of(group.planner.cluster))  # a new one logs no choices
        members = [group._members[rank] for rank in rail.members]
        # From the number of `group`: ranks may begin with two groups of one name in either order.
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
    def names(self) -> list[str]:
        """The host and address of each rank."""
        return [str(self._context.names[member]) for member in self._members]

    def native_error(self) -> NativeError:
        """Return the error that ended the group, as the native core gives it."""
        native = self._native
        if isinstance(native, ClosedGroup):
            return Fault.CLOSED, -1, native.why, ""
        return native.error()

    def notify(self, bell: Bell) -> None:
        """Ring the bell when a command comes, and when the group ends."""
        if not isinstance(self._native, ClosedGroup):
            self._native.notify(bell.fd)

    def send_command(self, command: Command) -> None:
        """Send a command to all other ranks. It arrives though they are busy, or held."""
        for rank in range(1, self.size):
            self.send(bytearray(encode(command)), rank, _TAG, async_op=True)

    def next_command(self) -> Command | None:
        """Return the next command of rank 0, or None if none has come yet."""
        native = self._native
        if isinstance(native, ClosedGroup) or not native.has_message(0, _TAG):
            return None
        data = bytearray(N_BYTES)
        self.recv(data, 0, _TAG)
        return decode(bytes(data))

    def most(self, value: int) -> int:
        """Return the highest value of all workers."""
        data = array.array("q", [value])
        self.all_reduce(data, Op.MAX)
        return data[0]

    def bytes_of_all(self, data: bytes, timeout_s: float, subject: int = 0) -> list[bytes]:
        """Return the bytes of each worker; all give the same number, for the same subject."""
        n = len(data)
        found = bytearray(n * self.size)
        self.all_gather(found, bytearray(data), timeout_s=timeout_s, subject=subject)
        return [bytes(found[rank * n : (rank + 1) * n]) for rank in range(self.size)]

    def tell(self, text: str) -> str:
        """Broadcast the text of rank 0, and return it."""
        length = array.array("q", [len(text.encode())])
        self.broadcast(length)
        data = bytearray(text.encode() if self.rank == 0 else bytes(length[0]))
        if data:
            self.broadcast(data)
        return data.decode()

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
