"""Shared code of the tests of labs: a check that they work here, and ranks in their hosts."""

import ctypes
import os
import secrets
import shutil

import pytest

from shoal.lab import Lab
from shoal.lab.cluster import INTERFACE

_CLONE_NEWNET = 0x40000000  # linux/sched.h

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="NOT TESTED: the lab needs root, ip and tc (iproute2)",
)


def enter(namespace: str) -> None:
    """Move this thread, and everything it starts later, into a host of a cluster."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def env_of(cluster: Lab) -> dict[str, str]:
    """Return the environment with which ranks in the hosts of a cluster meet."""
    return {
        "MASTER_ADDR": cluster.hosts[0].address,
        "SHOAL_SOCKET_IFNAME": INTERFACE,
        "SHOAL_KEY": secrets.token_hex(32),
    }
