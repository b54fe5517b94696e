"""The exceptions of shoal, one class per meaning.

`UsageError` is for the caller to fix, `PeerLost` and `TimedOut` come from outside, `Closed` means
that a program closed or aborted the group, `ProofError` blames a schedule and `InternalError`
blames shoal. `ShoalError` itself means that memory, descriptors or threads ran out.
Each class also derives from the matching built-in exception, so code that does not know shoal can
catch it, and from RuntimeError, which code around torch's collectives catches for any failure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
    """Drop the frames and causes inside the function from errors and Ctrl-C that leave it.

    The message holds all that a user can act on. InternalError keeps its frames: users report them.
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
    """The base class of all errors that shoal raises on purpose.

    Itself: a machine has no memory, descriptors or threads left. A group in which a call raises it
    has ended.
    """


class UsageError(ShoalError, ValueError):
    """The call is wrong, here or on a peer that disagrees.

    Raised at the start of a call: nothing was sent, and the group is usable. Raised by a call in
    flight, because ranks made different calls or gave lengths that do not match: the group has
    ended on every rank. Its buffers may be partly folded or overwritten: discard them.
    """


class Unsupported(UsageError, NotImplementedError):  # noqa: N818 - names the event
    """Shoal does not support the call (yet), or no library could. Nothing was sent."""


class PeerLost(ShoalError):  # noqa: N818 - names the event
    """A peer is gone, and this view of the group has ended.

    Tensors of collectives in flight are partly folded: discard them. Every later call on this
    group raises the same error; the survivors continue in the group that `shrink` returns.

    Args:
        rank: the lost peer's rank in the group; -1 if it is not known.
        host: the name of its host; empty if it is not known.
        address: its address; empty inside a host.
        doing: the interrupted wait, such as "recv 65536 B, chunk 5, step 17 of 30".
        reason: a verb phrase: how the peer was lost, such as "closed the link".
    """

    # The end of the message; an error of a group whose users do not shrink it has another.
    remedy = "shrink the group to go on without it"

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
        # Peers that gave this rank up have moved on and will not shrink a group with it.
        if self.reason.startswith(("gave this rank up", "goes on without this rank")):
            return f"{what}; this rank can only form a new group, with ranks that join it"
        if self.reason.startswith(("has left the meeting", "no longer serves the store")):
            return f"{what}; no group has formed, so every rank has to join again"
        return f"{what}; {self.remedy}"


class TimedOut(ShoalError, TimeoutError):  # noqa: N818 - names the event
    """A deadline passed while every peer was still alive.

    The deadline of a call ends its group on every rank, and buffers in flight are partly folded.
    The deadline of one `Work.wait` ends only that wait: the call goes on.
    """

    def __str__(self) -> str:
        # Programs look for these words in a RuntimeError of a collective.
        return f"timed out: {super().__str__()}"


class Closed(ShoalError):  # noqa: N818 - names the event
    """The group or the link cannot be used any more.

    This process closed it, shrank or grew it, or forked; or some rank aborted it, which ends it on
    every rank.
    """


class ProofError(ShoalError):
    """A schedule breaks the contract of its collective. It was not run."""


class InternalError(ShoalError):
    """Shoal broke one of its own rules: please report it. The group cannot be used any more."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ring?" for a mistyped `name`; "" if no known name is similar."""
    import difflib  # rarely needed

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
