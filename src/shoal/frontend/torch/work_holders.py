"""Replaced methods of torch, whose C++ handles a Work written in Python incompletely.

Since torch 2.14 the C++ puts such a Work into a PyWorkHolder, which forwards only `wait` and
`get_future`. Its other methods return defaults: never complete, always successful, and without the
source that `recv` reads. In Python it is a plain `torch.distributed.Work`, from which no class can
be derived. So this module replaces the methods of that class: they call the Work inside if shoal
made it, and torch's own method otherwise.

A Reducer keeps only the C++ half of the Work that it is given, whose `wait` never returns once the
Python half is gone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.frontend.torch.work import this_thread

if TYPE_CHECKING:
    from shoal.frontend.torch.work import FinishedWork

_NOT_FORWARDED: Final = (
    *("is_completed", "is_success", "exception", "result", "synchronize"),
    *("source_rank", "_source_rank", "_get_sequence_number"),
)

# The type of operation that a holder reports; works of torch's own backends report their own.
_UNKNOWN: Final = 100


def _held(holder: Any) -> FinishedWork | None:
    """Return shoal's Work in a holder; None for every other Work."""
    if holder._get_op_type() != _UNKNOWN:
        return None
    found = this_thread.lookup = []
    try:
        holder.get_future()  # forwarded to the Work inside
    except RuntimeError:  # from a Work of another backend, without futures
        return None
    finally:
        this_thread.lookup = None
    return found[0] if found else None


def _forwarding(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any) -> Any:
        work = _held(self)
        return own(self, *args) if work is None else getattr(work, name)(*args)

    return forward


@functools.cache
def patch_work_holders() -> None:
    """Let holders in this process forward all methods to shoal's works from now on."""
    work: Any = dist.Work
    for name in _NOT_FORWARDED:
        if hasattr(work, name):  # torch 2.13 has no _get_sequence_number
            setattr(work, name, _forwarding(name, getattr(work, name)))


@functools.cache
def patch_reducers() -> None:
    """Let each Reducer in this process keep the Work of `DistributedDataParallel.join` alive."""
    c10d: Any = torch._C._distributed_c10d
    reducer = c10d.Reducer
    own = reducer._set_forward_pass_work_handle
    kept: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()

    @functools.wraps(own)
    def keep(self: Any, work: dist.Work, *args: Any) -> None:
        own(self, work, *args)
        kept[self] = work  # the previous one ends: the Reducer has dropped it too

    reducer._set_forward_pass_work_handle = keep
