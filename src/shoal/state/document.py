"""The state of this process as plain data: what the JSON file holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from shoal import engine
from shoal.state import SOURCES
from shoal.state.waits import waits_of

VERSION: Final = 1
"""The version of the document; raised when a reader of the last one would misunderstand it."""

# A turn of the thread that drives a mesh takes about a millisecond; more means that it is stuck.
_PATIENCE_S: Final = 5.0

_LOADED: Final = ("shoal", "torch")  # modules whose version is shown if they are loaded
_OWN: Final = str(Path(__file__).parents[1])
_MOST_FRAMES: Final = 12  # of each thread's stack, the innermost


def describe(why: str, taken: Mapping[Any, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the state of all worlds of this process.

    Args:
        why: the reason for this document, for its reader.
        taken: by context, native states taken before; the others are taken now.
    """
    worlds = [world_of(source, (taken or {}).get(source)) for source in all_of(SOURCES)]
    worlds.sort(key=lambda world: -len(world["ranks"]))
    return {
        "shoal_dump": VERSION,
        "why": why,
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "taken_at_s": time.time(),
        "rank": worlds[0]["rank"] if worlds else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {
            **{name: getattr(sys.modules.get(name), "__version__", None) for name in _LOADED},
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "settings": {
            name: "(set)" if name == "SHOAL_KEY" else value
            for name, value in sorted(os.environ.items())
            if name.startswith("SHOAL_")
        },
        "fold_isa": engine.fold_isa(),
        "wakeups": engine.wakeups(),
        "threads": _threads(),
        "worlds": worlds,
    }


def world_of(source: Any, taken: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of one world; `taken`: its native state, if it was taken before."""
    mesh = source.mesh
    native = taken if taken is not None else mesh.state(_PATIENCE_S) if mesh is not None else None
    names = {
        f"{group.native_id:016x}": group.name for group in all_of(source.groups) if group.native_id
    }
    world: dict[str, Any] = {
        "epoch": f"{source.epoch:016x}",
        "rank": source.rank,
        "ranks": [
            {"host": info.host, "address": info.address, "process_id": info.process_id}
            for info in source.names
        ],
        "is_closed": mesh is None,
        "is_stuck": mesh is not None and native is None,
    }
    if native is None:
        return {**world, "groups": [], "peers": []}
    native = of_all_channels(native)
    for group in native["groups"]:
        group["name"] = names.get(group["id"])
        for call in group["in_flight"]:
            call["waits"] = waits_of(call)
    known = ("rank", "size", "taken_ns", "channel")
    return {**world, **{name: value for name, value in native.items() if name not in known}}


def of_all_channels(native: dict[str, Any]) -> dict[str, Any]:
    """Merge the states of a mesh's channels; entries of later channels name their channel."""
    for other in native.pop("more", ()):
        mark = {"channel": other["channel"]}
        groups = {group["id"]: group for group in native["groups"]}
        for group in other["groups"]:
            group["in_flight"] = [{**call, **mark} for call in group["in_flight"]]
            known = groups.get(group["id"])
            if known is None:
                native["groups"].append(group)
                continue
            for name in ("in_flight", "made_by_others", "n_in_flight_left_out"):
                known[name] += group[name]
            known["ended"] = known["ended"] or group["ended"]
        native["peers"] += [{**peer, **mark} for peer in other["peers"] if peer["link"] != "none"]
        for name in ("n_in_flight", "scratch_bytes"):
            native[name] += other[name]
        for name, n_bytes in other["staging"].items():
            native["staging"][name] += n_bytes
    return native


_Item = TypeVar("_Item")


def all_of(items: Iterable[_Item]) -> list[_Item]:
    """Return the items of a set that other threads may add to meanwhile."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):  # it changed while it was read
            return list(items)
    return []


def _threads() -> list[dict[str, Any]]:
    """Return the stack of every Python thread, innermost last, and where it left user code."""
    frames = sys._current_frames()  # the only way to see other threads
    found = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        # NOT extract_stack: it reads the source files, from a disk that may not answer.
        stack = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES) if frame else ()
        lines = [f"{at.f_code.co_filename}:{line} in {at.f_code.co_name}" for at, line in stack]
        lines.reverse()
        theirs = [line for line in lines if not line.startswith(_OWN)]
        found.append({"name": thread.name, "stack": lines, "at": (theirs or lines or [""])[-1]})
    return found
