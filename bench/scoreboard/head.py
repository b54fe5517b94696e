"""The head of the project's tables: the run as `shoal bench` describes it, and the commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from shoal.bench.machine import describe_run


def head_of(command: Sequence[str]) -> dict[str, str]:
    """Return date, machine, load, versions, command and the commit of the working tree."""
    return describe_run(command) | {"commit": _commit()}


def _commit() -> str:
    """Return the commit of the working tree; "+" if files differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit + "+" * bool(_git("status", "--porcelain")) if commit else "none"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""  # no git
    return done.stdout.strip() if done.returncode == 0 else ""
