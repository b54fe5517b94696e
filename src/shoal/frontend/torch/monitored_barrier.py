"""The barrier that says who did not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, cast

from shoal.errors import Closed, ShoalError, TimedOut
from shoal.frontend.torch.tensor_buffers import describe

if TYPE_CHECKING:
    from shoal.group.group import Group
    from shoal.group.work import Work


class MonitoredBarrier:
    """The monitored barriers of one group.

    They send messages in a group of their own, so that one that fails ends no other; it is made
    anew after that.
    """

    def __init__(self, group: Group) -> None:
        self._parent = group
        self._group: Group | None = None
        self._n_failed = 0

    def wait(self, timeout_s: float) -> None:
        """Wait until every rank has come here, and say on every rank which ones did not.

        Nothing else of the group comes to harm: afterwards it can be used, and this called again.

        Args:
            timeout_s: for how long rank 0 waits, and the others a second more: only rank 0 can
                name those that did not come.

        Raises:
            TimedOut: names the ranks that had not come when the first deadline passed.
            PeerLost: a rank is gone: said at once.
        """
        parent = self._parent
        if parent.size == 1:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if self._group is None:
                everyone, name = list(range(parent.size)), f"monitored_barrier/{self._n_failed}"
                self._group = parent.subgroup(everyone, name)
            doing = describe(parent, "monitored_barrier")
            if parent.rank == 0:
                _let_all_go(self._group, doing, timeout_s, deadline)
            else:
                _report(self._group, doing, timeout_s)
        except ShoalError:
            self._group, self._n_failed = None, self._n_failed + 1
            raise


def _let_all_go(group: Group, doing: str, timeout_s: float, deadline: float) -> None:
    """Rank 0 receives a message from each rank, lets all go, and receives that they went.

    The last tells a rank that waits from one that came, gave up, and said so meanwhile.
    """
    arrivals: dict[int, Work] = {}
    try:
        for rank in range(1, group.size):
            arrivals[rank] = _receive(group, rank, timeout_s)
        for arrival in arrivals.values():
            arrival.wait(max(deadline - time.monotonic(), 0.0))
        for rank in arrivals:
            group.send(bytearray(1), rank, timeout_s=timeout_s + _GRACE_S)
        for departure in [_receive(group, rank, timeout_s) for rank in arrivals]:
            departure.wait(_GRACE_S)
    except (TimedOut, Closed) as error:
        missing = [rank for rank, work in arrivals.items() if not work.done() or work.error()]
        why = doing
        if missing:
            late = ", ".join(map(str, missing))
            why = f"{why}: within {timeout_s:g} s these ranks had not come: {late}"
        if isinstance(error, Closed):
            why = f"{why}: another rank gave up: {error}"
        group.abort(why)
        raise TimedOut(f"{why}; look at what they are doing") from error


def _report(group: Group, doing: str, timeout_s: float) -> None:
    """Every other rank tells rank 0 that it is here, and waits to be let go."""
    longer = timeout_s + _GRACE_S
    try:
        group.send(bytearray(1), 0, timeout_s=longer)
        _receive(group, 0, timeout_s).wait(timeout_s + _MARGIN_S)
        group.send(bytearray(1), 0, timeout_s=longer)
    except Closed as error:  # rank 0 says who has not come
        raise TimedOut(f"{doing} failed: {error}") from error
    except TimedOut as error:
        why = f"{doing}: heard nothing from rank 0 for {timeout_s:g} s"
        group.abort(why)
        raise TimedOut(f"{why}; rank 0 or another rank has not come") from error


def _receive(group: Group, rank: int, timeout_s: float) -> Work:
    # NOT with this call's deadline: it would end the group before the others are told why.
    longer = timeout_s + _GRACE_S
    return cast("Work", group.recv(bytearray(1), rank, timeout_s=longer, async_op=True))


# How much longer the others wait than rank 0, who alone can say which ones did not come.
_MARGIN_S: Final = 1.0

# By how much the messages' own deadlines are longer than the barrier's.
_GRACE_S: Final = 5.0
