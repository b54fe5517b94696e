"""The progress of a run: one line on a terminal, rewritten again and again."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

_CLEAR: Final = "\r\x1b[K"


class Progress:
    """A line of the terminal. Leaving the context clears it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start_s = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def show(self, what: str) -> None:
        """Show the current work, and the time since the start."""
        text = f"{time.monotonic() - self._start_s:4.0f} s  {what}"
        self._write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        """Remove the line, before other lines are printed."""
        self._write(_CLEAR)

    def _write(self, text: str) -> None:
        if self._is_shown:
            self._stream.write(text)
            self._stream.flush()
