"""The names of a lab's namespaces: whose they are, and what to do when nobody's.

A name holds the lab's own name, and the process that made it with the time at which that process
started, so that no later process with the same number passes for it. Besides them there is only
what stands in /etc/netns under the same names, and goes first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from shoal.errors import Unsupported, UsageError
from shoal.lab.iproute import ip

_FOLDER: Final = Path("/run/netns")  # where `ip netns` keeps the names
_FILES: Final = Path("/etc/netns")  # what it shows in /etc to what it starts there (ip-netns(8))
_PREFIX: Final = "shoal-lab"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}"
_PARTS: Final = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-({_NAME})-(switch|\d+)")

# A killed process is gone within milliseconds, unless it sleeps in the kernel.
_DEATH_S: Final = 5.0


class Namespace(NamedTuple):
    """One namespace of a lab, as its name tells."""

    full: str
    pid: int
    started: int
    lab: str
    part: str
    """The number of a host, or "switch"."""

    @property
    def is_stale(self) -> bool:
        """Whether the process that made it is gone."""
        return _start_of(self.pid) != self.started


def check_name(name: str) -> None:
    """Raises UsageError: no lab can have this name."""
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{name!r} is no name for a lab: expected 1 to 40 letters, digits, '_', '.' or '-', "
            "the first one a letter or a digit"
        )


def prefix_of(name: str) -> str:
    """What the names of a lab that this process makes begin with, before "-" and the part."""
    return f"{_PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{name}"


def namespaces() -> list[Namespace]:
    """Those of all labs on this machine, stale ones too."""
    found = (_PARTS.fullmatch(path.name) for path in _FOLDER.glob(f"{_PREFIX}-*"))
    return [
        Namespace(each[0], int(each[1]), int(each[2]), each[3], each[4]) for each in found if each
    ]


def remove_stale() -> set[str]:
    """Remove the labs of processes that are gone, and kill what still runs in them: their names."""
    stale = [each for each in namespaces() if each.is_stale]
    for each in stale:
        remove(each.full)
    return {each.lab for each in stale}


def remove(namespace: str) -> None:
    """Kill what runs in a namespace and remove it; nothing if it is gone."""
    shutil.rmtree(_FILES / namespace, ignore_errors=True)  # first: the namespace tells of it
    deadline = time.monotonic() + _DEATH_S
    # Another process may be removing the same stale one; then it is gone, which is all we want.
    with suppress(Unsupported):
        # Until none is left: what a process starts while we look is missed by that look. And the
        # namespace itself would live on with its last process. Only the lab's own run there.
        while (_FOLDER / namespace).exists() and (pids := ip("netns", "pids", namespace).split()):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        if (_FOLDER / namespace).exists():
            ip("netns", "delete", namespace)


def write_hosts(namespace: str, text: str) -> None:
    """Make `text` what processes of a namespace find in /etc/hosts; without, where it cannot be."""
    with suppress(OSError):
        (_FILES / namespace).mkdir(parents=True, exist_ok=True)
        (_FILES / namespace / "hosts").write_text(text)


def _start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None: it is gone, or a zombie."""
    try:
        # proc(5): the name in brackets may hold anything; then field 3, the state. 22 is the start.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
