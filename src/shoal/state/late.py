"""Warns of ranks that are late to a call while others wait in it."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from shoal.state import SOURCES
from shoal.state.document import all_of, world_of
from shoal.state.text import named

_LOG: Final = logging.getLogger("shoal")

_lock = threading.Lock()
_due: dict[int, tuple[str, float]] = {}
"""By group id: the key of its oldest call, and the age at which the next warning is due."""


def warn_of_late(native_id: int | None, late_s: float) -> None:
    """Warn of ranks that a group's oldest call waits for, at age `late_s` and each doubling."""
    if native_id is None or not _lock.acquire(blocking=False):
        return  # the group is closed, or another thread warns already
    try:
        for source in all_of(SOURCES):
            if native_id in {group.native_id for group in all_of(source.groups)}:
                for text in late_in(world_of(source), native_id, late_s, _due):
                    _LOG.warning("%s", text)
    except Exception:  # noqa: BLE001 - a warning must not end the caller's wait
        _LOG.exception("the late rank cannot be named")
    finally:
        _lock.release()


def late_in(
    world: dict[str, Any], native_id: int, late_s: float, due: dict[int, tuple[str, float]]
) -> list[str]:
    """Return the warnings due for a group of a dumped world; updates `due`, see `_due`."""
    groups = [group for group in world["groups"] if group["id"] == f"{native_id:016x}"]
    calls = [call for group in groups for call in group["in_flight"] if not call["awaits_message"]]
    if not calls:
        due.pop(native_id, None)
        return []
    oldest = max(calls, key=lambda call: float(call["age_s"]))
    key, due_s = due.get(native_id, ("", 0.0))
    if key != oldest["key"]:
        due_s = late_s
    ranks = world["ranks"]
    late = [wait["rank"] for wait in oldest["waits"] if wait["is_blamed"] and not wait["in_call"]]
    if oldest["age_s"] < due_s or not late:
        return []
    while due_s <= oldest["age_s"]:
        due_s *= 2
    due[native_id] = oldest["key"], due_s
    return [
        f"{named(world['rank'], ranks)} has waited {oldest['age_s']:.1f} s in {oldest['what']} "
        f"(call {oldest['serial']} of group {groups[0]['name']!r}) for {named(rank, ranks)}, which "
        "has not joined this call"
        for rank in late
    ]
