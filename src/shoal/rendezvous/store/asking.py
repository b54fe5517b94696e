"""Wraps a store so that its calls end by a deadline.

A store's client may block for its own timeout: torch's waits in C++, for up to half an hour, and
shoal must not change the timeout of a user's store. So the calls run on a separate thread, and the
rank waits for each answer only until its deadline.

The thread ends with the join. A thread that is stuck in a call is left behind: it is a daemon,
keeps only the store alive, and ends with that call, at the latest at the store's own timeout.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from shoal.errors import PeerLost, ShoalError, TimedOut
from shoal.rendezvous.store import MemoryStore, Store, TorchStore
from shoal.threads import start

# A working store answers within this time. So a call made just before the deadline may take this
# long; otherwise the error would blame the store although this rank was late.
_SUSPICIOUS_S: Final = 0.1
_ON_ITS_WAY_S: Final = 0.01  # an answer takes 10 us from shoal's store, and a few ms from far away

_Result = TypeVar("_Result")
# Both begin with the number of the call, by which a late reply to an interrupted call is skipped.
_Call = tuple[int, Callable[..., Any], tuple[Any, ...]]
_Reply = tuple[int, Any, BaseException | None]


def _never() -> float:
    return float("inf")


class Caller:
    """Makes calls to `where` on a separate thread, until `deadline`, which may be changed.

    One caller at a time.
    """

    def __init__(self, where: str, deadline: float) -> None:
        self.deadline = deadline
        # Called during a wait for an answer. Returns the time of its next call.
        self.alarm: Callable[[], float] = _never
        self._where = where
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        self._has_thread = False
        self._n_calls = 0
        self._owed: tuple[str, float] | None = None  # the answer awaited, and since when

    def call(
        self, doing: str, function: Callable[..., _Result], *args: Any, takes_s: float = 0.0
    ) -> _Result:
        """Return the function's result or raise its error; ShoalError if no thread can be started.

        TimedOut without an answer by `deadline`, or up to 0.1 s later if the answer was due shortly
        before it (`takes_s` after the call). The call may still happen, at any later time.
        """
        if not self._has_thread:
            # NOT a method: a thread that is left behind must not keep the join alive.
            start("shoal store", _answer, self._calls, self._replies)
            self._has_thread = True
        self._n_calls += 1
        since = time.monotonic() + takes_s
        self._owed = doing, since
        self._calls.put((self._n_calls, function, args))
        value: _Result
        value, error = self._await_reply(since)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # else the error and this frame keep each other alive

    @property
    def silence(self) -> str:
        """A sentence about the answer that is awaited, and how long; empty if none is."""
        if self._owed is None:
            return ""
        doing, since = self._owed
        owed_s = max(0.0, time.monotonic() - since)
        asks = ": is its process stopped, or its host cut off?" if owed_s >= _SUSPICIOUS_S else ""
        return f"{self._where} has not answered for {owed_s:.3g} s ({doing}){asks}"

    def close(self) -> None:
        """End the thread, after its current call; idempotent."""
        self.alarm = _never
        self._calls.put(None)

    def _await_reply(self, since: float) -> tuple[Any, BaseException | None]:
        """Return the reply to the last call; skip replies to earlier, interrupted calls."""
        while True:
            expires = max(self.deadline, min(since, self.deadline) + _SUSPICIOUS_S)
            # NOT sooner: until then the answer is not late.
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
    """A store with a deadline, for one rank while it joins. One caller at a time.

    Every call raises TimedOut without an answer by `deadline`, but may still happen later. Calls
    raise PeerLost once the store has failed. Costs 30 us for the thread and 8 us for each call.
    """

    def __init__(self, store: Store, deadline: float) -> None:
        super().__init__(f"the store at {store.host}" if store.host else "the store", deadline)
        self.host = store.host
        # torch logs two warnings for each wait that ends without a value.
        self.can_wait = not isinstance(store, TorchStore)
        # False: rank 0 may form the group before others, and then close its store.
        self.outlives_join = bool(getattr(store, "outlives_join", False))
        self._store = store
        self.lost: tuple[Any, ...] = ()  # the arguments of `PeerLost`, once the store has failed

    def set(self, key: str, value: bytes) -> None:
        """As `Store.set`."""
        self._ask(f"set of {key!r}", self._store.set, key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """As `Store.get`."""
        doing = f"get of {key!r}"
        takes_s = timeout_s + _SUSPICIOUS_S
        return self._ask(doing, self._store.get, key, timeout_s, takes_s=takes_s)

    def try_get(self, key: str) -> bytes | None:
        """As `Store.try_get`."""
        return self._ask(f"try_get of {key!r}", self._store.try_get, key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """As `Store.try_get_all`."""
        return self._ask(f"try_get of {len(keys)} keys", self._store.try_get_all, keys)

    def close(self) -> None:
        """End the thread, after its current call, and release the store; idempotent."""
        super().close()
        self._store = MemoryStore()

    def _ask(
        self, doing: str, function: Callable[..., _Result], *args: Any, takes_s: float = 0.0
    ) -> _Result:
        if self.lost:
            raise PeerLost(*self.lost)  # NOT the first error again: its traceback keeps frames
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
    """Make one call after the other, on the thread."""
    while (call := calls.get()) is not None:
        number, function, args = call
        try:
            replies.put((number, function(*args), None))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            replies.put((number, None, error))
        del call, function, args
