"""How often the holders of a key may ask for a process."""

from __future__ import annotations

from typing import Final

# A job whose servers come one after another asks for up to ten views in a second, and then for few.
# Forking one takes the parent 10 ms: a key in a loop gets a 25th of its time.
AT_ONCE: Final = 16
AT_ONCE_OF_KEY: Final = 4 * AT_ONCE
"""Of all who hold it: each rail of a job asks for its own views, and they ask at the same time."""
_PAUSE_S: Final = 0.25


class Pace:
    """So many at once, and then one each 0.25 s. Reads no clock."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._early_s = (at_once - 1) * _PAUSE_S
        self._free_at = 0.0

    def due(self, now: float) -> float | None:
        """When one can be taken; None: now."""
        due = self._free_at - self._early_s
        return due if now < due else None

    def take(self, now: float) -> float | None:
        """Take one. When to ask again, if there is none now; None: it was taken."""
        due = self.due(now)
        if due is None:
            self._free_at = max(now, self._free_at) + _PAUSE_S
        return due
