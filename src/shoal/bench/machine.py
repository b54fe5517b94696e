"""The place, time and versions of a run: the head of every table and log entry."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def describe_run(command: Sequence[str]) -> dict[str, str]:
    """Return date, machine, load, versions and command."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {_memory()}",
        "kernel": platform.release(),
        "load": f"{os.getloadavg()[0]:.2f} before the run",
        "versions": f"Python {platform.python_version()}, torch {_version('torch')}",
        "command": shlex.join(command),
    }


def render_run(run: Mapping[str, str]) -> str:
    """Return a comment line for each fact."""
    return "".join(f"# {name}: {value}\n" for name, value in run.items())


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    return found[1].strip() if found else platform.machine()


def _memory() -> str:
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{n_bytes / 2**30:.0f} GiB"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
