"""What the calls are for that a thread makes by torch's functions; see `shoal.group.subjects`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final


class _Current(threading.local):
    subject = 0


_current: Final = _Current()


@contextlib.contextmanager
def calls_for(subject: int) -> Iterator[None]:
    """Have the ranks compare this with the calls that this thread starts meanwhile."""
    before, _current.subject = _current.subject, subject
    try:
        yield
    finally:
        _current.subject = before


def current_subject() -> int:
    """What the calls of this thread are for; 0: nothing that has a name."""
    return _current.subject
