"""The collectives and the reductions behind torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions

from shoal.dtypes import Op
from shoal.errors import Unsupported
from shoal.schedule.collectives import Blocks, Root, row_of

Access = tuple[bool, bool]  # whether a rank's buffer is read, and whether it is written

READ: Final[Access] = (True, False)
WRITTEN: Final[Access] = (False, True)
UPDATED: Final[Access] = (True, True)

if TYPE_CHECKING:
    from shoal.frontend.torch.layouts import Arguments
    from shoal.frontend.torch.tensor_buffers import TensorBuffers

    LayOut = Callable[[TensorBuffers, Any, Any], list[Arguments]]


class TorchCollective(NamedTuple):
    """A collective as a method of a group: it takes the buffers, then the root, then the fold.

    Args:
        name: of the method.
        options: torch's class of its options.
        alike: which of its buffers is as long on every rank; None if none is.
    """

    name: str
    options: type
    has_root: bool
    folds: bool
    alike: int | None

    def accesses(self, is_root: bool) -> tuple[Access, ...]:
        """What this rank does to each of its buffers."""
        row = row_of(self.name)
        if not row.in_place:
            return WRITTEN, READ
        if row.root is Root.GIVES:
            return (READ if is_root else WRITTEN,)
        return (UPDATED if is_root or row.root is Root.NONE else READ,)


class TableRow(NamedTuple):
    """What one operation of torch checks and calls.

    Args:
        name: as users know it, for messages.
        lay_out: checks the tensors, and makes the collective's buffers of them: one tuple for each
            time that the collective is called.
    """

    name: str
    lay_out: LayOut
    collective: TorchCollective


def _collective(name: str, options: type) -> TorchCollective:
    row = row_of(name)
    alike = None if row.by_pair else int(row.reads is Blocks.OWN)  # what is written comes first
    return TorchCollective(name, options, row.root is not Root.NONE, row.folds, alike)


ALL_REDUCE: Final = _collective("all_reduce", dist.AllreduceOptions)
REDUCE: Final = _collective("reduce", dist.ReduceOptions)
REDUCE_SCATTER: Final = _collective("reduce_scatter", dist.ReduceScatterOptions)
BROADCAST: Final = _collective("broadcast", dist.BroadcastOptions)
SCATTER: Final = _collective("scatter", dist.ScatterOptions)
GATHER: Final = _collective("gather", dist.GatherOptions)
ALL_GATHER: Final = _collective("all_gather", AllgatherOptions)
ALL_TO_ALL: Final = _collective("all_to_all", AllToAllOptions)
BARRIER: Final = _collective("barrier", BarrierOptions)


# ---- reductions ----

# What PREMUL_SUM multiplies a rank's own contribution by; None for every other operation.
Factor = float | torch.Tensor | None

_PREMUL_SUM: Final = hash(dist.ReduceOp.PREMUL_SUM)

# By the hash, which in torch is the operation's number: the quickest way to it, 0.3 us.
_FOLDS: Final = {hash(getattr(dist.ReduceOp, op.name)): op for op in Op}


def fold_of(reduce_op: dist.ReduceOp) -> tuple[Op, Factor]:
    """The fold that `reduce_op` asks for, and what to multiply the own contribution by before.

    Raises:
        Unsupported: no such operation.
    """
    number = hash(reduce_op)
    op = _FOLDS.get(number)
    if op is not None:
        return op, None
    if number == _PREMUL_SUM:
        # Pickling's way to the factor: torch 2.11 has no other, ReduceOp.factor is of 2.13.
        state: tuple[object, float | torch.Tensor] = reduce_op.__getstate__()  # type: ignore[assignment]
        return Op.SUM, state[1]
    raise Unsupported(f"ReduceOp number {number} is not supported")
