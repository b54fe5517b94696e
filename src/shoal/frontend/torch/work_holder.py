"""What torch 2.14 and later hand out in place of a Work written in Python, made to tell the truth.

Their C++ puts such a Work into a PyWorkHolder, which forwards `wait` and `get_future` alone. All
else it answers as an object that knows nothing: never complete, successful whatever happened, and
without a source, which `recv` asks for when it has taken the message. In Python it is a plain
`torch.distributed.Work`, and nothing can be derived from it. So the methods of that class are
replaced: they ask the Work inside if it is one of shoal's, and are torch's own otherwise.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shoal.frontend.torch.work import FinishedWork

__all__ = ["future_for_lookup", "patch_work_holders"]

_NOT_FORWARDED: Final = (
    *("is_completed", "is_success", "exception", "result", "synchronize"),
    *("source_rank", "_source_rank"),
)

# Of the works of torch's own backends every one says what kind it is; a holder does not.
_UNKNOWN: Final = 100

_NO_FUTURE: Final[torch.futures.Future[Any]] = torch.futures.Future()


class _Lookup(threading.local):
    """Collects the Work that this thread looks for in a holder; None while it looks for none."""

    found: list[FinishedWork] | None = None


_lookup: Final = _Lookup()


def future_for_lookup(work: FinishedWork) -> torch.futures.Future[Any] | None:
    """What `get_future` of a Work returns while it is looked for in a holder; else None."""
    if _lookup.found is None:
        return None
    _lookup.found.append(work)
    return _NO_FUTURE


def _held(holder: Any) -> FinishedWork | None:
    """The Work of shoal in a holder; None for every other Work."""
    if holder._get_op_type() != _UNKNOWN:
        return None
    found: list[FinishedWork] = []
    _lookup.found = found
    try:
        holder.get_future()  # forwarded, so the Work inside notices
    except RuntimeError:  # another backend's, without futures
        return None
    finally:
        _lookup.found = None
    return found[0] if found else None


def _forwarding(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any) -> Any:
        work = _held(self)
        return own(self, *args) if work is None else getattr(work, name)(*args)

    return forward


@functools.cache
def patch_work_holders() -> None:
    """From now on, have holders of shoal's works forward everything, in this process."""
    work: Any = dist.Work
    for name in _NOT_FORWARDED:
        setattr(work, name, _forwarding(name, getattr(work, name)))
