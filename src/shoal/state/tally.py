"""Counts the calls of a world by collective, and the time in which any of them was in flight."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

# Ended calls are counted once this many calls are noted, so each costs a few microseconds.
_SWEEP_AT: Final = 64

Ended = dict[tuple[int | None, str], tuple[int, int]]
"""Calls and bytes, by the native id of the group and the collective's name."""

_Noted = tuple[int, Any, tuple[int | None, str], int]
_PATIENCE_S: Final = 0.25  # of a reader, for a thread that is counting


class Tally:
    """The counts of one world since construction. Threads: any."""

    def __init__(self) -> None:
        self._lock, self._sweeping = threading.Lock(), threading.Lock()
        self._noted: list[_Noted] = []
        self._sweep_at = _SWEEP_AT
        self._began_ns = self._until_ns = time.monotonic_ns()
        self._busy_ns = 0
        self._ended: Ended = {}

    def note(self, call: Any, group_id: int | None, collective: str, n_bytes: int) -> None:
        """Note a call that has just begun."""
        noted = time.monotonic_ns(), call, (group_id, collective), n_bytes
        with self._lock:
            self._noted.append(noted)
            is_due = len(self._noted) >= self._sweep_at
        if is_due:
            self._sweep(0)

    def read(self) -> tuple[float, float, Ended]:
        """Return the seconds counted, the seconds with a call in flight, and the ended calls."""
        self._sweep(_PATIENCE_S)
        with self._lock:
            counted_s = (self._until_ns - self._began_ns) / 1e9
            return counted_s, self._busy_ns / 1e9, dict(self._ended)

    def forget(self) -> None:
        """Drop the calls in flight, which would keep the links' descriptors open."""
        self._sweep(_PATIENCE_S)
        with self._lock:
            self._noted.clear()

    def _sweep(self, patience_s: float) -> None:
        """Count the calls that have ended; give up if another thread counts for this long."""
        if not self._sweeping.acquire(timeout=patience_s):
            return
        try:
            with self._lock:
                noted, self._noted = self._noted, []
            now = time.monotonic_ns()
            # NOT under `_lock`: noticing the end of a call runs callbacks, which may make calls.
            # A call that the workers completed after servers had left has no known end.
            ends = [(one[1].finished_ns or now) if one[1].done() else 0 for one in noted]
            with self._lock:
                self._count(list(zip(noted, ends, strict=True)), now)
        finally:
            self._sweeping.release()

    def _count(self, found: list[tuple[_Noted, int]], now: int) -> None:
        running = [noted for noted, finished_ns in found if not finished_ns]
        for (_, _, key, n_bytes), finished_ns in found:
            if finished_ns:
                n_calls, n_before = self._ended.get(key, (0, 0))
                self._ended[key] = n_calls + 1, n_before + n_bytes
        for start, end in sorted((noted[0], min(end or now, now)) for noted, end in found):
            self._busy_ns += max(0, end - max(start, self._until_ns))
            self._until_ns = max(self._until_ns, end)
        self._until_ns = now
        self._noted += running
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._noted))
