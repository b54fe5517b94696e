"""The exceptions of shoal, one class per meaning.

`UsageError` is for the caller to fix, `PeerLost` and `TimedOut` come from outside, `Closed` means
that this side closed the group, `ProofError` blames a schedule and `InternalError` blames shoal.
Each is also the built-in exception that its meaning suggests, so code that knows nothing of shoal
can catch it, and a RuntimeError, which code around torch's collectives expects of any failure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ClassVar, ParamSpec, TypeVar

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
    """Drop the frames and causes inside the function from errors and Ctrl-C that leave it.

    The message holds all that its reader can act on. InternalError keeps its frames: users report
    them.
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
    """The base class of all errors that shoal raises on purpose."""


class UsageError(ShoalError, ValueError):
    """The call is wrong, here or on a peer that disagrees. No byte of any tensor has moved."""


class Unsupported(UsageError, NotImplementedError):  # noqa: N818 - says what happened
    """Shoal cannot do that (yet), or no library could. No byte of any tensor has moved."""


class PeerLost(ShoalError):  # noqa: N818 - says what happened
    """A peer is gone, and with it this view of the group.

    Tensors of collectives in flight are partly folded: discard them. Every later call on this
    group raises the same error; the survivors continue in the group that `shrink` returns.

    Args:
        rank: the lost peer's rank in the group; -1 if it is not known.
        host: the name of its host; empty if it is not known.
        address: its address; empty inside a host.
        doing: the interrupted wait, such as "recv 65536 B, chunk 5, step 17 of 30".
        reason: a verb phrase: how the peer was lost, such as "closed the link".
    """

    # The end of the message; front ends whose users shrink no group put their own here.
    remedy: ClassVar[str] = "shrink the group to go on without it"

    def __init__(
        self, rank: int, host: str = "", address: str = "", doing: str = "", reason: str = "is gone"
    ) -> None:
        # All of these are `args`, so that the error survives pickling between processes.
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
        # The peers that gave this rank up have moved on and will not shrink a group with it.
        if self.reason.startswith(("gave this rank up", "goes on without this rank")):
            return f"{what}; this rank can only form a new group, with ranks that join it"
        if self.reason.startswith(("has left the meeting", "no longer serves the store")):
            return f"{what}; no group has formed, so every rank has to join anew"
        return f"{what}; {self.remedy}"


class TimedOut(ShoalError, TimeoutError):  # noqa: N818 - says what happened
    """The deadline passed while every peer was still alive. In-flight tensors are partly folded."""

    def __str__(self) -> str:
        # Programs look for these words in a RuntimeError of a collective.
        return f"timed out: {super().__str__()}"


class Closed(ShoalError):  # noqa: N818 - says what happened
    """This side has closed the group or the link, which cannot be used any more."""


class ProofError(ShoalError):
    """A schedule breaks the contract of its collective. It has not been run."""


class InternalError(ShoalError):
    """Shoal broke one of its own rules: please report it. The group cannot be used any more."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ring?" for the known name nearest to a mistyped one, or ""."""
    import difflib  # rarely needed

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
