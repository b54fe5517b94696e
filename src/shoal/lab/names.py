"""The namespaces of labs: their names, the removal of stale ones, and the tools of iproute2.

A name holds the lab's own name, the id of the process that made it and the start time of that
process, so no later process with the same id is mistaken for it. The lab's files in /etc/netns have
the same names, and are removed first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from shoal.errors import TimedOut, Unsupported, UsageError

_FOLDER: Final = Path("/run/netns")  # `ip netns` keeps the names here
_FILES: Final = Path("/etc/netns")  # `ip netns exec` binds these files over /etc (ip-netns(8))
_PREFIX: Final = "shoal-lab"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}"
_PARTS: Final = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-({_NAME})-(switch|\d+)")

# A killed process is gone within milliseconds, unless it sleeps in the kernel.
_DEATH_S: Final = 5.0
# A call of a tool takes milliseconds. It waits for the kernel's lock on network devices.
_TOOL_S = 60.0


class Namespace(NamedTuple):
    """One namespace of a lab, parsed from its name."""

    full: str
    pid: int
    started: int
    lab: str
    part: str
    """The number of a host, or "switch"."""

    @property
    def is_stale(self) -> bool:
        """True if the process that made it is gone."""
        return _start_of(self.pid) != self.started


def check_name(name: str) -> None:
    """Raise UsageError if no lab can have this name."""
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"a lab's name must be 1 to 40 letters, digits, '_', '.' or '-', and begin with a "
            f"letter or a digit, got {name!r}"
        )


def prefix_of(name: str) -> str:
    """Return the start of the names of a lab that this process makes, before "-" and the part."""
    return f"{_PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{name}"


def namespaces() -> list[Namespace]:
    """Return the namespaces of all labs on this machine, with stale ones."""
    found = (_PARTS.fullmatch(path.name) for path in _FOLDER.glob(f"{_PREFIX}-*"))
    return [
        Namespace(each[0], int(each[1]), int(each[2]), each[3], each[4]) for each in found if each
    ]


def remove_stale() -> set[str]:
    """Remove the labs of dead processes, kill the processes left in them, and return the names."""
    stale = [each for each in namespaces() if each.is_stale]
    for each in stale:
        remove(each.full)
    return {each.lab for each in stale}


def remove(namespace: str) -> None:
    """Kill the processes in a namespace and remove it; does nothing if it is gone."""
    # The files go first: once the namespace is gone, nothing refers to them.
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
    deadline = time.monotonic() + _DEATH_S
    # Another process may be removing the same stale namespace, which is fine.
    with suppress(Unsupported):
        # Repeat until no process is left: one look misses a process started meanwhile, and the
        # namespace lives as long as its last process. Only the lab's own processes run there.
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
    """Show processes of a namespace `text` as /etc/hosts, if the file can be written."""
    with suppress(OSError):
        (_FILES / namespace).mkdir(parents=True, exist_ok=True)
        (_FILES / namespace / "hosts").write_text(text)


def _start_of(pid: int) -> int | None:
    """Return a process's start in ticks since boot; None: it is gone, or a zombie."""
    try:
        # proc(5): the name in brackets may hold anything; then field 3, the state. 22 is the start.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def check_powers() -> None:
    """Raise UsageError with a remedy if not root, or without iproute2."""
    if os.geteuid() != 0:
        raise UsageError(
            "a lab of network namespaces needs root: run it with sudo, or in a container started "
            "with --privileged"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not found: install iproute2")


def ip(*arguments: str) -> str:
    """Run `ip` and return its output; Unsupported or TimedOut, with the command, if it fails."""
    return _call("ip", *arguments)


def tc(*arguments: str) -> str:
    """Run `tc` like `ip`."""
    return _call("tc", *arguments)


def _call(*argv: str) -> str:
    command = " ".join(argv)
    # In a new session, so that an interrupt at the terminal does NOT end it half-way.
    tool = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, why = tool.communicate(timeout=_TOOL_S)
    except BaseException as error:
        tool.kill()
        with suppress(subprocess.TimeoutExpired):
            tool.communicate(timeout=_DEATH_S)  # NOT for ever: it may sleep in the kernel
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise TimedOut(
            f"`{command}` did not end within {_TOOL_S:g} s and was killed: look for stuck network "
            "devices in `dmesg`. The next lab removes the rest of this one"
        ) from None
    if tool.returncode != 0:
        raise Unsupported(
            f"`{command}` failed: {why.strip().rstrip('.')}. A lab needs a kernel with network "
            "namespaces, veth, bridge and tbf, and a container that may use them"
        )
    return printed
