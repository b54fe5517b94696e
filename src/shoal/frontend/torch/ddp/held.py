"""Callbacks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def not_held(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of what may be gone; then the call does nothing.

    For what is kept by something that lives longer, as hooks by parameters, or by what the method's
    object keeps itself: so a dropped wrapper frees its memory without the collector of cycles,
    which does not see through native parts.
    """
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return found(*args) if found is not None else None

    return call
