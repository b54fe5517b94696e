"""The state of this process as plain data, the content of the JSON file."""

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

VERSION: Final = 1
"""The document's version; raised when readers of the previous one would misread the new one."""

# A turn of the thread that drives a mesh takes about a millisecond; more means that it is stuck.
_PATIENCE_S: Final = 5.0

_LOADED: Final = ("shoal", "torch")  # modules whose version is shown if they are loaded
_OWN: Final = str(Path(__file__).parents[1])
_MOST_FRAMES: Final = 12  # of each thread's stack, the innermost

WORDS: Final = {
    "data": "no data has arrived from it",
    "grant": "it has not granted the next segment",
    "credit": "it has not returned room for small messages",
    "slot": "it holds all slots of shared memory that it may hold",
    "consumed": "it has not read the segments in shared memory",
    "link": "its link does not take the queued data",
    "earlier calls": "it is far behind, in calls before this one",
    "lost peer": "it is gone",
}
"""The reasons why a step waits for its peer, by the native core's word.

Three more words blame no peer: "turn" (another step of the call goes first), "scratch" (other
calls hold the memory) and "nothing" (the step is about to move).
"""


def describe(why: str, taken: Mapping[Any, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the state of all worlds of this process; `why` is the reason to record.

    `taken` has native states taken earlier, by context; the others are taken now.
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
    """Return the state of one world; `taken`: its native state, if taken earlier."""
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
        with contextlib.suppress(RuntimeError):  # the set changed during the copy
            return list(items)
    return []


def waits_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the peers that a call waits for: the peers to blame first, then by longest wait.

    The peers that owe data are to blame; if no peer does, all that hold up a send. If some of these
    have not made the call, only they are to blame: the others may wait for the same ranks.
    """
    in_call = {peer["rank"]: peer["in_call"] for peer in call["peers"]}
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for step in call["steps"]:
        if step["awaits"] not in WORDS:
            continue
        entry = found.setdefault(
            (step["peer"], step["awaits"]),
            {"rank": step["peer"], "why": step["awaits"], "since_s": 0.0, "n_steps": 0},
        )
        entry["since_s"] = max(entry["since_s"], step["since_s"])
        entry["n_steps"] += 1
        entry["in_call"] = in_call.get(step["peer"], False)
    waits = list(found.values())
    blamed = [wait for wait in waits if wait["why"] == "data"] or waits
    blamed = [wait for wait in blamed if not wait["in_call"]] or blamed
    for wait in waits:
        wait["is_blamed"] = wait in blamed
    return sorted(waits, key=lambda wait: (not wait["is_blamed"], -wait["since_s"], wait["rank"]))


def _threads() -> list[dict[str, Any]]:
    """Return every Python thread's stack, innermost frame last, and its innermost user frame."""
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
