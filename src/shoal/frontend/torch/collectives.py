"""The collectives and the reductions behind torch's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions

from shoal.dtypes import Op
from shoal.errors import Unsupported
from shoal.schedule.collectives import Blocks, Root, row_of

Access = tuple[bool, bool]  # True if a rank's buffer is read, and True if it is written

READ: Final[Access] = (True, False)
WRITTEN: Final[Access] = (False, True)
UPDATED: Final[Access] = (True, True)


@dataclass(frozen=True, slots=True)
class TorchCollective:
    """A collective as a method of a group: it takes the buffers, then the root, then the fold.

    Args:
        options: torch's class of its options.
        alike: the index of the buffer with the same length on every rank; None if there is none.
    """

    name: str
    options: type
    has_root: bool
    folds: bool
    alike: int | None

    @classmethod
    def of(cls, name: str, options: type) -> TorchCollective:
        """Return the collective of a row of shoal's table."""
        row = row_of(name)
        alike = None if row.by_pair else int(row.reads is Blocks.OWN)  # the written buffer is first
        return cls(name, options, row.root is not Root.NONE, row.folds, alike)

    def accesses(self, is_root: bool) -> tuple[Access, ...]:
        """Return how this rank uses each of its buffers."""
        row = row_of(self.name)
        if not row.in_place:
            return WRITTEN, READ
        if row.root is Root.GIVES:
            return (READ if is_root else WRITTEN,)
        return (UPDATED if is_root or row.root is Root.NONE else READ,)


ALL_REDUCE: Final = TorchCollective.of("all_reduce", dist.AllreduceOptions)
REDUCE: Final = TorchCollective.of("reduce", dist.ReduceOptions)
REDUCE_SCATTER: Final = TorchCollective.of("reduce_scatter", dist.ReduceScatterOptions)
BROADCAST: Final = TorchCollective.of("broadcast", dist.BroadcastOptions)
SCATTER: Final = TorchCollective.of("scatter", dist.ScatterOptions)
GATHER: Final = TorchCollective.of("gather", dist.GatherOptions)
ALL_GATHER: Final = TorchCollective.of("all_gather", AllgatherOptions)
ALL_TO_ALL: Final = TorchCollective.of("all_to_all", AllToAllOptions)
BARRIER: Final = TorchCollective.of("barrier", BarrierOptions)


# ---- reductions ----

# PREMUL_SUM multiplies a rank's own contribution by it; None for other operations.
Factor = float | torch.Tensor | None

_PREMUL_SUM: Final = hash(dist.ReduceOp.PREMUL_SUM)

# The hash of an operation is its number in torch, and the quickest way to get it: 0.3 us.
_FOLDS: Final = {hash(getattr(dist.ReduceOp, op.name)): op for op in Op}


def fold_of(reduce_op: dist.ReduceOp) -> tuple[Op, Factor]:
    """Return the fold of `reduce_op` and its factor; Unsupported if shoal has no such fold."""
    number = hash(reduce_op)
    op = _FOLDS.get(number)
    if op is not None:
        return op, None
    if number == _PREMUL_SUM:
        # The factor as pickled: torch 2.11 gives no other access, ReduceOp.factor is from 2.13.
        state: tuple[object, float | torch.Tensor] = reduce_op.__getstate__()  # type: ignore[assignment]
        return Op.SUM, state[1]
    raise Unsupported(f"ReduceOp number {number} is not supported")
