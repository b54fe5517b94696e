"""Barriers: the plain one, and the one that says who did not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from torch._C._distributed_c10d import BarrierOptions

from shoal.errors import Closed, ShoalError, TimedOut
from shoal.frontend.torch.operations.calls import NO_TENSORS, Calls, options_of
from shoal.frontend.torch.work import NO_TIMEOUT

if TYPE_CHECKING:
    import torch.distributed as dist

    from shoal.group.group import Group
    from shoal.group.work import Work


class Meeting(Calls):
    """Collectives without data."""

    _roll: Group | None = None  # see _roll_group
    _n_rolls = 0

    def barrier(
        self,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Wait until every rank has come here."""
        if not isinstance(opts, BarrierOptions):
            opts = options_of(BarrierOptions, timeout if opts is None else opts)
        return self._run(self._group.barrier, [()], opts, NO_TENSORS, None)

    # ---- who did not come? ----

    def monitored_barrier(
        self,
        timeout: timedelta | BarrierOptions | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Wait until every rank has come here, and say on every rank which ones did not.

        Nothing else of the group comes to harm: afterwards it can be used, and this called again.

        Args:
            timeout: for how long rank 0 waits, and the others a second more: only rank 0 can name
                those that did not come. None takes the group's. Torch 2.14 and later give options.
            wait_all_ranks: makes no difference: all ranks that did not come are named anyway.

        Raises:
            TimedOut: names the ranks that had not come when the first deadline passed.
            PeerLost: a rank is gone: said at once.
        """
        if isinstance(timeout, BarrierOptions):
            timeout = timeout.timeout
        given = timeout is not None and timeout > NO_TIMEOUT
        timeout_s = cast("timedelta", timeout).total_seconds() if given else self._timeout_s
        if self._group.size == 1:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if self._group.rank == 0:
                self._call_the_roll(self._roll_group(), timeout_s, deadline)
            else:
                self._answer(self._roll_group(), timeout_s)
        except ShoalError:
            self._roll, self._n_rolls = None, self._n_rolls + 1
            raise

    def _roll_group(self) -> Group:
        """A group for this alone, so that its failing ends no other; made anew after it failed."""
        if self._roll is None:
            everyone = list(range(self._group.size))
            self._roll = self._group.subgroup(everyone, f"monitored_barrier/{self._n_rolls}")
        return self._roll

    def _call_the_roll(self, roll: Group, timeout_s: float, deadline: float) -> None:
        """Rank 0 hears from all, lets all go, and hears that they went.

        The last tells a rank that waits from one that came, gave up, and said so meanwhile.
        """
        words: dict[int, Work] = {}
        try:
            for rank in range(1, roll.size):
                words[rank] = self._hear(roll, rank, timeout_s)
            for word in words.values():
                word.wait(max(deadline - time.monotonic(), 0.0))
            for rank in words:
                roll.send(bytearray(1), rank, timeout_s=timeout_s + _GRACE_S)
            for last_word in [self._hear(roll, rank, timeout_s) for rank in words]:
                last_word.wait(_GRACE_S)
        except (TimedOut, Closed) as error:
            missing = [rank for rank, word in words.items() if not word.done() or word.error()]
            why = self.describe("monitored_barrier")
            if missing:
                late = ", ".join(map(str, missing))
                why = f"{why}: within {timeout_s:g} s these ranks had not come: {late}"
            if isinstance(error, Closed):
                why = f"{why}: another rank gave up: {error}"
            roll.abort(why)
            raise TimedOut(f"{why}; look at what they are doing") from error

    def _hear(self, roll: Group, rank: int, timeout_s: float) -> Work:
        # NOT with this call's deadline: it would end the roll before the others are told why.
        longer = timeout_s + _GRACE_S
        return cast("Work", roll.recv(bytearray(1), rank, timeout_s=longer, async_op=True))

    def _answer(self, roll: Group, timeout_s: float) -> None:
        """Every other rank tells rank 0 that it is here, and waits to be let go."""
        doing = self.describe("monitored_barrier")
        longer = timeout_s + _GRACE_S
        try:
            roll.send(bytearray(1), 0, timeout_s=longer)
            self._hear(roll, 0, timeout_s).wait(timeout_s + _MARGIN_S)
            roll.send(bytearray(1), 0, timeout_s=longer)
        except Closed as error:  # rank 0 says who has not come
            raise TimedOut(f"{doing} failed: {error}") from error
        except TimedOut as error:
            why = f"{doing}: heard nothing from rank 0 for {timeout_s:g} s"
            roll.abort(why)
            raise TimedOut(f"{why}; rank 0 or another rank has not come") from error


# How much longer the others wait than rank 0, who alone can say which ones did not come.
_MARGIN_S: Final = 1.0

# By how much the messages' own deadlines are longer than the barrier's.
_GRACE_S: Final = 5.0
