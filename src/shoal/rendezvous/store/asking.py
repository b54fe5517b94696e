"""A store whose calls end by a deadline, whatever the store does.

A store's client may wait for as long as its own timeout says: torch's waits in C++, for up to half
an hour, and the timeout of a user's store is not ours to change. So the calls run on a thread of
their own, and the rank waits for the answers no longer than it wants to.

The thread ends with the join. One that is stuck in a call is left behind: it is a daemon, keeps
nothing but the store, and ends when that call does, at the latest at the store's own timeout.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from shoal.errors import PeerLost, ShoalError, TimedOut
from shoal.rendezvous.store import MemoryStore, Store, TorchStore
from shoal.threads import start

# A store that answers at all does so in less; sooner, nothing speaks against it. So a call that is
# made just before the deadline is given this long, else the store would be blamed for our lateness.
_SUSPICIOUS_S: Final = 0.1
_ON_ITS_WAY_S: Final = 0.01  # an answer takes 10 us from our own store, and a few ms from far away

# Both begin with the number of the call: an interrupt may strike just as a reply is taken.
_Call = tuple[int, Callable[..., Any], tuple[Any, ...]]
_Reply = tuple[int, Any, BaseException | None]


def _never() -> float:
    return float("inf")


class Caller:
    """Makes calls to `where` on a thread of its own, until `deadline`, which may be moved.

    One caller at a time.
    """

    def __init__(self, where: str, deadline: float) -> None:
        self.deadline = deadline
        # Called while an answer is owed, whenever the time that it returned last has come.
        self.alarm: Callable[[], float] = _never
        self._where = where
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        self._has_thread = False
        self._n_calls = 0
        self._owed: tuple[str, float] | None = None  # which answer, and since when

    def call(
        self, doing: str, function: Callable[..., Any], *args: Any, takes_s: float = 0.0
    ) -> Any:
        """Return what the function returns, or raise its error; ShoalError if no thread can be had.

        TimedOut if there is no answer by `deadline`, or 0.1 s later if it was owed (`takes_s` after
        the call) since shortly before. The call may still happen, at any later time.
        """
        if not self._has_thread:
            # NOT a method: a thread that is left behind must not keep the whole join.
            start("shoal store", _answer, self._calls, self._replies)
            self._has_thread = True
        self._n_calls += 1
        since = time.monotonic() + takes_s
        self._owed = doing, since
        self._calls.put((self._n_calls, function, args))
        value, error = self._await_reply(since)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # else it keeps this frame, and this frame keeps it

    @property
    def silence(self) -> str:
        """How long which answer has been owed to us, in words; empty if none is."""
        if self._owed is None:
            return ""
        doing, since = self._owed
        owed_s = max(0.0, time.monotonic() - since)
        asks = ": is its process stopped, or its host cut off?" if owed_s >= _SUSPICIOUS_S else ""
        return f"{self._where} has not answered for {owed_s:.3g} s ({doing}){asks}"

    def close(self) -> None:
        """End the thread, once it is not stuck in a call; idempotent."""
        self.alarm = _never
        self._calls.put(None)

    def _await_reply(self, since: float) -> tuple[Any, BaseException | None]:
        """The reply to the last call; those to earlier ones, which interrupts cut short, go by."""
        while True:
            expires = max(self.deadline, min(since, self.deadline) + _SUSPICIOUS_S)
            # An answer that is merely on its way is no silence to tell of.
            silent_at = since + _ON_ITS_WAY_S
            wake_at = min(expires, self.alarm() if time.monotonic() >= silent_at else silent_at)
            try:
                number, value, error = self._replies.get(
                    timeout=max(0.0, wake_at - time.monotonic())
                )
            except queue.Empty:
                if time.monotonic() >= expires:
                    raise TimedOut(self.silence) from None
            else:
                if number == self._n_calls:
                    self._owed = None
                    return value, error


class Asking(Caller):
    """A view of a store, for one rank while it joins. One caller at a time.

    Every call raises TimedOut without an answer by `deadline`, though it may still happen later;
    and PeerLost once the store has failed. Takes 30 us for the thread, 8 us for each call.
    """

    def __init__(self, store: Store, deadline: float) -> None:
        super().__init__(f"the store at {store.host}" if store.host else "the store", deadline)
        self.host = store.host
        # torch writes two warnings for each wait that ends without a value.
        self.can_wait = not isinstance(store, TorchStore)
        # False: rank 0 may have formed the group before others, and may end its store then.
        self.outlives_join = bool(getattr(store, "outlives_join", False))
        self._store = store
        self.lost: tuple[Any, ...] = ()  # the arguments of `PeerLost`, once the store has failed

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over whatever is there."""
        self._ask(f"set of {key!r}", self._store.set, key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting until there is one; `TimedOut` if it does not come."""
        doing = f"get of {key!r}"
        takes_s = timeout_s + _SUSPICIOUS_S
        value: bytes = self._ask(doing, self._store.get, key, timeout_s, takes_s=takes_s)
        return value

    def try_get(self, key: str) -> bytes | None:
        """The value if there is one by now."""
        value: bytes | None = self._ask(f"try_get of {key!r}", self._store.try_get, key)
        return value

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values if there are all by now."""
        doing = f"try_get of {len(keys)} keys"
        values: list[bytes] | None = self._ask(doing, self._store.try_get_all, keys)
        return values

    def close(self) -> None:
        """End the thread, once it is not stuck in a call, and let go of the store; idempotent."""
        super().close()
        self._store = MemoryStore()

    def _ask(
        self, doing: str, function: Callable[..., Any], *args: Any, takes_s: float = 0.0
    ) -> Any:
        if self.lost:
            raise PeerLost(*self.lost)  # NOT the same one: what it was raised for would hold it
        try:
            return self.call(doing, function, *args, takes_s=takes_s)
        except PeerLost as error:
            self.lost = error.args
            raise
        except ShoalError:
            raise
        except (RuntimeError, ConnectionError) as error:  # torch's DistError is a RuntimeError
            reason = f"no longer serves the store: {error}"
            self.lost = -1, "", self.host or "", f"store {doing}", reason
            raise PeerLost(*self.lost) from error


def _answer(calls: queue.SimpleQueue[_Call | None], replies: queue.SimpleQueue[_Reply]) -> None:
    """The thread: make one call after the other."""
    while (call := calls.get()) is not None:
        number, function, args = call
        try:
            replies.put((number, function(*args), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            replies.put((number, None, error))
        del call, function, args
