"""Runs the tools of iproute2, after checking that this process may use them."""

from __future__ import annotations

import os
import shutil
import subprocess

from shoal.errors import Unsupported, UsageError


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
    """Run `ip` and return its output.

    Raises:
        Unsupported: it failed; the message has the command and its error.
    """
    return _call("ip", *arguments)


def tc(*arguments: str) -> str:
    """Run `tc` like `ip`."""
    return _call("tc", *arguments)


def _call(*argv: str) -> str:
    # In a session of its own, so that an interrupt at the terminal does NOT end it half way.
    done = subprocess.run(argv, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        why = done.stderr.strip().rstrip(".")
        raise Unsupported(
            f"`{' '.join(argv)}` failed: {why}. A lab needs a kernel with network namespaces, "
            "veth, bridge and tbf, and a container that may use them"
        )
    return done.stdout
