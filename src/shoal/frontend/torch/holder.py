"""What torch 2.14 and later hand out in place of a Work written in Python: taught to say the truth.

Their C++ puts such a Work into a holder that forwards `wait` and `get_future` alone. All else it
answers as an object that knows nothing: never complete, successful whatever happened, and without
a source, which `recv` asks for when it has taken the message. The holder is a plain
`torch.distributed.Work` and nothing can be derived from it, so the answers of that class are put
right: they ask the Work inside if it is one of shoal's, and are torch's own otherwise.
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

__all__ = ["answers", "teach_holders"]

_NOT_FORWARDED: Final = (
    *("is_completed", "is_success", "exception", "result", "synchronize"),
    *("source_rank", "_source_rank"),
)

# Of the works of torch's own backends every one says what kind it is; a holder does not.
_UNKNOWN: Final = 100

_NOTHING: Final[torch.futures.Future[Any]] = torch.futures.Future()


class _Question(threading.local):
    """Who answers when this thread asks a holder whose Work it has; None while it does not ask."""

    found: list[FinishedWork] | None = None


_question: Final = _Question()


def answers(work: FinishedWork) -> torch.futures.Future[Any] | None:
    """What a Work of shoal gives for its future if this is the question who it is; else None."""
    if _question.found is None:
        return None
    _question.found.append(work)
    return _NOTHING


def _held(holder: Any) -> FinishedWork | None:
    """The Work of shoal in a holder; None for every other Work."""
    if holder._get_op_type() != _UNKNOWN:
        return None
    found: list[FinishedWork] = []
    _question.found = found
    try:
        holder.get_future()  # forwarded, so the Work inside notices
    except RuntimeError:  # another backend's, without futures
        return None
    finally:
        _question.found = None
    return found[0] if found else None


def _asking(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def ask(self: Any, *args: Any) -> Any:
        work = _held(self)
        return own(self, *args) if work is None else getattr(work, name)(*args)

    return ask


@functools.cache
def teach_holders() -> None:
    """From now on, have holders of shoal's works answer for them, in this process."""
    work: Any = dist.Work
    for name in _NOT_FORWARDED:
        setattr(work, name, _asking(name, getattr(work, name)))
