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
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shoal import engine
from shoal.state.sources import SOURCES
from shoal.state.waits import waits_of

if TYPE_CHECKING:
    from shoal.state.sources import ContextSource

VERSION: Final = 1
"""Of the document. One number more where a reader of the last would misunderstand it."""

# A turn of whoever drives a mesh takes about a millisecond; more means that it is stuck.
_PATIENCE_S: Final = 5.0

_OWN: Final = str(Path(__file__).parents[1])
_MOST_FRAMES: Final = 12  # of each thread's stack, the innermost


def describe(
    why: str, told: Mapping[ContextSource, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The state of all worlds of this process.

    Args:
        why: it is made, for the reader.
        told: what the native core told of some of them before; the others are asked now.
    """
    told = told or {}
    worlds = [world_of(source, told.get(source)) for source in all_of(SOURCES)]
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
            "shoal": _version("shoal"),
            "torch": _version("torch"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "settings": _settings(os.environ),
        "fold_isa": engine.fold_isa(),
        "wakeups": engine.wakeups(),
        "threads": _threads(),
        "worlds": worlds,
    }


def world_of(source: ContextSource, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of one world; `told`: what the native core told of it before."""
    mesh = source.mesh
    native = told if told is not None else mesh.state(_PATIENCE_S) if mesh is not None else None
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
    """What the channels of a mesh told, in one; what is of a later one says of which."""
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
    """What is in a set that other threads may add to meanwhile."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):  # it changed while it was read
            return list(items)
    return []


def _version(module: str) -> str | None:
    """Of what is loaded."""
    return getattr(sys.modules.get(module), "__version__", None)


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that shoal reads; of the keys only that they are set."""
    return {
        name: "(set)" if name == "SHOAL_KEY" else value
        for name, value in sorted(environ.items())
        if name.startswith("SHOAL_")
    }


def _threads() -> list[dict[str, Any]]:
    """What every Python thread is doing, innermost last, and where it left the program's code."""
    frames = sys._current_frames()  # the one way to see other threads
    told = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        # NOT extract_stack: it reads the source files, from a disk that may not answer.
        stack = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES) if frame else ()
        lines = [f"{at.f_code.co_filename}:{line} in {at.f_code.co_name}" for at, line in stack]
        lines.reverse()
        theirs = [line for line in lines if not line.startswith(_OWN)]
        told.append({"name": thread.name, "stack": lines, "at": (theirs or lines or [""])[-1]})
    return told
