"""How far a run is: one line on a terminal that is written again and again, and else nothing."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

_CLEAR: Final = "\r\x1b[K"
_COLUMNS: Final = 80  # where the terminal does not say how wide it is


class Progress:
    """A line of the terminal. Leaving the context clears it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start_s = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def say(self, what: str) -> None:
        """Show what is going on now, and for how long it has been."""
        if self._is_shown:
            text = f"{time.monotonic() - self._start_s:4.0f} s  {what}"
            self._stream.write(_CLEAR + text[: self._width() - 1])
            self._stream.flush()

    def clear(self) -> None:
        """Take the line away, before other lines are printed."""
        if self._is_shown:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except OSError:
            return _COLUMNS
