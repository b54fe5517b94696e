"""The collectives of a shoal group, as the table of torch's operations names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions

if TYPE_CHECKING:
    from shoal.frontend.torch.layouts import Arguments
    from shoal.frontend.torch.tensor_buffers import TensorBuffers
    from shoal.group import Group

    LayOut = Callable[[TensorBuffers, Any, Any], list[Arguments]]


class Collective(NamedTuple):
    """A collective of a shoal group.

    Args:
        options: torch's class of its options.
        of: the method of a group. After the buffers it takes the root, then the fold.
        alike: which of its buffers is as long on every rank; None if none is.
    """

    options: type
    of: Callable[[Group], Callable[..., Any]]
    has_root: bool = False
    folds: bool = False
    alike: int | None = 0


class Row(NamedTuple):
    """What one operation of torch checks and calls.

    Args:
        name: as users know it, for messages.
        lay_out: checks the tensors, and makes the collective's buffers of them: one tuple for each
            time that the collective is called.
    """

    name: str
    lay_out: LayOut
    collective: Collective


ALL_REDUCE: Final = Collective(dist.AllreduceOptions, lambda group: group.all_reduce, folds=True)
REDUCE: Final = Collective(dist.ReduceOptions, lambda group: group.reduce, True, True)
REDUCE_SCATTER: Final = Collective(
    dist.ReduceScatterOptions, lambda group: group.reduce_scatter, folds=True
)
BROADCAST: Final = Collective(dist.BroadcastOptions, lambda group: group.broadcast, True)
SCATTER: Final = Collective(dist.ScatterOptions, lambda group: group.scatter, True)
GATHER: Final = Collective(dist.GatherOptions, lambda group: group.gather, True, alike=1)
ALL_GATHER: Final = Collective(AllgatherOptions, lambda group: group.all_gather, alike=1)
ALL_TO_ALL: Final = Collective(AllToAllOptions, lambda group: group.all_to_all, alike=None)
BARRIER: Final = Collective(BarrierOptions, lambda group: group.barrier)
