"""What the pool threads of all workers tell each other, in a group that only they use.

They make the same calls in the same order. None has a deadline, unless it mends a call that has:
each ends with the group of the workers at the latest.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.dtypes import DType, Op
from shoal.engine import Fault, make_plan
from shoal.group.calls import ClosedGroup
from shoal.group.context import hash_of
from shoal.group.group import Group
from shoal.group.work import FOR_EVER_S
from shoal.plan import Planner
from shoal.shapes import Shape

if TYPE_CHECKING:
    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.served_call import NativeError
    from shoal.group.work import Work


class Control(Group):
    """That group."""

    @classmethod
    def of(cls, group: Group, rail: Rail) -> Control:
        """The one of the ranks along a rail of this group."""
        title = f"{group.name} (rail {rail.place})" if rail.n_rails > 1 else group.name
        # Which says nothing of what it chooses.
        planner = Planner(rail.cluster_of(group.planner.cluster))
        members = [group._members[rank] for rank in rail.members]
        # By that of the group: of two with one name, ranks may make the first call in either order.
        native_id = hash_of("pool control", group.native_id, rail.place)
        return cls(
            *(group._context, members, f"{title}/pool control", FOR_EVER_S, planner),
            native_id=native_id,
        )

    @property
    def leader(self) -> int:
        """Rank 0, as the links number it."""
        return self._members[0]

    @property
    def epoch(self) -> int:
        """Of its mesh: random, and the same on all workers."""
        return self._context.epoch

    @property
    def names(self) -> list[str]:
        """By rank, where it is."""
        return [str(self._context.names[member]) for member in self._members]

    def native_error(self) -> NativeError:
        """What has ended it, as the native core says it."""
        native = self._native
        if isinstance(native, ClosedGroup):
            return Fault.CLOSED, -1, native.why, ""
        return native.error()

    def most(self, value: int) -> int:
        """The highest of what all workers give."""
        data = array.array("q", [value])
        self.all_reduce(data, Op.MAX)
        return data[0]

    def bytes_of_all(self, data: bytes, timeout_s: float, subject: int = 0) -> list[bytes]:
        """By worker, what it gave; all give equally many, for the same subject."""
        n = len(data)
        found = bytearray(n * self.size)
        self.all_gather(found, bytearray(data), timeout_s=timeout_s, subject=subject)
        return [bytes(found[rank * n : (rank + 1) * n]) for rank in range(self.size)]

    def tell(self, text: str) -> str:
        """What rank 0 says, to all."""
        length = array.array("q", [len(text.encode())])
        self.broadcast(length)
        data = bytearray(text.encode() if self.rank == 0 else bytes(length[0]))
        if data:
            self.broadcast(data)
        return data.decode()

    def start_broadcast(self, data: BufferView, root: int, timeout_s: float) -> Work:
        """Overwrite `data` with that of rank `root`; the caller keeps the memory alive."""
        work = self.broadcast(data, root, timeout_s=timeout_s, async_op=True)
        assert work is not None
        return work

    def fold_at(self, blocks: Sequence[BufferView], dtype: DType, op: Op, timeout_s: float) -> Work:
        """Fold block r of every rank, from rank r downwards, into that of rank r, where it lies.

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
