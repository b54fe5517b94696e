"""One class per meaning: who has to act, and what is still true afterwards.

`UsageError` is the caller's to mend, `PeerLost` and `TimedOut` are the world's doing, `Closed`
means that somebody here closed it, `ProofError` blames a schedule, `InternalError` blames shoal.
Each also is the built-in exception that its meaning suggests, so code that knows nothing of shoal
can catch it; and a RuntimeError, which code around torch's collectives expects of whatever fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "ShoalError",
    "UsageError",
    "Unsupported",
    "PeerLost",
    "TimedOut",
    "Closed",
    "ProofError",
    "InternalError",
]


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def without_internals(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Let errors leave the function, and Ctrl-C too, without the frames and causes inside it.

    An error says all that its reader can act on. InternalError keeps its frames: they are reported.
    """

    @functools.wraps(function)
    def call(*args: _Given.args, **named: _Given.kwargs) -> _Result:
        try:
            return function(*args, **named)
        except InternalError:
            raise
        except (ShoalError, KeyboardInterrupt) as error:
            raise error.with_traceback(None) from None

    return call


class ShoalError(RuntimeError):
    """The root: everything that shoal raises on purpose."""


class UsageError(ShoalError, ValueError):
    """The call is wrong, here or on a peer that disagrees. No byte of any tensor has moved."""


class Unsupported(UsageError, NotImplementedError):  # noqa: N818 - says what happened
    """Shoal cannot do that (yet), or nobody could. No byte of any tensor has moved."""


class PeerLost(ShoalError):  # noqa: N818 - says what happened
    """A peer is gone, and with it this view of the group.

    Tensors of collectives that were in flight are partly folded: discard them. Every later call on
    this group raises the same; the survivors go on in what `shrink` returns.

    Args:
        rank: the culprit's rank in the group; -1 if it is not known.
        host: the name of the culprit's host; empty if it is not known.
        address: where it was reached; empty inside a host.
        doing: what was waited for, such as "recv 65536 B, chunk 5, step 17 of 30".
        reason: a verb phrase: how it was lost, such as "closed the link".
    """

    def __init__(
        self, rank: int, host: str = "", address: str = "", doing: str = "", reason: str = "is gone"
    ) -> None:
        # All of them are `args`, so that the error survives pickling between processes.
        super().__init__(rank, host, address, doing, reason)
        self.rank = rank
        self.host = host
        self.address = address
        self.doing = doing
        self.reason = reason

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "an unknown rank"
        host = f"on {self.host}" if self.host else ""
        address = f"at {self.address}" if self.address else ""
        doing = f"({self.doing})" if self.doing else ""
        what = " ".join(filter(None, (who, host, address, self.reason, doing)))
        # Who gave this rank up has gone on, and nobody shrinks a group with it.
        if self.reason.startswith(("gave this rank up", "goes on without this rank")):
            return f"{what}; this rank can only form a new group, with whoever meets it"
        if self.reason.startswith(("has left the meeting", "no longer serves the store")):
            return f"{what}; no group has formed, so every rank has to join anew"
        return f"{what}; shrink the group to go on without it"


class TimedOut(ShoalError, TimeoutError):  # noqa: N818 - says what happened
    """The deadline passed while every peer was still alive. In-flight tensors are partly folded."""

    def __str__(self) -> str:
        # These words are what programs look for in a RuntimeError of a collective.
        return f"timed out: {super().__str__()}"


class Closed(ShoalError):  # noqa: N818 - says what happened
    """This side has closed the group or the link; nothing more can be done with it."""


class ProofError(ShoalError):
    """A schedule does not keep the contract of its collective. It has not been run."""


class InternalError(ShoalError):
    """Shoal broke its own rule: please report it. The group cannot be used any more."""
