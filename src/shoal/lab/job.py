"""A job on a lab: the processes of each host, and their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from shoal.lab.cluster import INTERFACE, Lab

_MASTER_PORT: Final = 29500  # every port of a host is free


@dataclass(frozen=True)
class Job:
    """A command on the first hosts of a lab; the others are reduction servers.

    Args:
        key_file: the file of the job's key, which ranks and servers share.
    """

    command: Sequence[str]
    n_worker_hosts: int
    ranks_per_host: int
    key_file: str


@dataclass(frozen=True)
class Task:
    """A process in a host: its label in the output, and its command and environment."""

    label: str
    host: int
    argv: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    is_server: bool


def tasks_of(job: Job, lab: Lab) -> list[Task]:
    """Return the servers of a job, then its ranks in order."""
    return [*_servers(job, lab), *_ranks(job, lab)]


def server_command(key_file: str) -> list[str]:
    """Return the command of a reduction server."""
    shoal = [sys.executable, "-m", "shoal"]
    return [*shoal, "server", "--listen", INTERFACE, "--key-file", key_file]


def _servers(job: Job, lab: Lab) -> Iterator[Task]:
    command = server_command(job.key_file)
    for host in lab.hosts[job.n_worker_hosts :]:
        environ = _surroundings() | lab.environment_of(host.index, [host.index])
        yield Task(f"server{host.index}", host.index, command, environ, is_server=True)


def _ranks(job: Job, lab: Lab) -> Iterator[Task]:
    """Yield the ranks by host, with torchrun's variables and the lab's."""
    n_hosts, n_local = job.n_worker_hosts, job.ranks_per_host
    common = {
        "WORLD_SIZE": str(n_hosts * n_local),
        "LOCAL_WORLD_SIZE": str(n_local),
        "GROUP_WORLD_SIZE": str(n_hosts),
        "MASTER_ADDR": lab.hosts[0].address,
        "MASTER_PORT": str(_MASTER_PORT),
        "SHOAL_KEY_FILE": job.key_file,
    }
    if servers := lab.hosts[n_hosts:]:
        common.update(SHOAL_SERVERS=",".join(server.address for server in servers))
    for rank in range(n_hosts * n_local):
        host, local = divmod(rank, n_local)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
        label = f"host{host}.{local}" if n_local > 1 else f"host{host}"
        environ = _surroundings() | common | lab.environment_of(host, range(n_hosts)) | place
        yield Task(label, host, job.command, environ, is_server=False)


def _surroundings() -> dict[str, str]:
    """Return this process's variables without another launcher's job and another key."""
    defaults = {
        "PYTHONUNBUFFERED": "1",  # else lines arrive late, in blocks: a pipe is not a terminal
        "OMP_NUM_THREADS": "1",  # as torchrun does; all hosts share the cores
    }
    return defaults | {
        name: value
        for name, value in os.environ.items()
        if name != "SHOAL_KEY" and not name.startswith("TORCHELASTIC_")
    }


@contextmanager
def private_key(key: str = "") -> Iterator[str]:
    """Yield the path of an in-memory file with a key, or a new key; it ends with this process."""
    fd = os.memfd_create("shoal-key")
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, os.fsencode(key or os.urandom(32).hex()))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)
