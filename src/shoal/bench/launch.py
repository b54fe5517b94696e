"""How the ranks of each library are started: command, environment, place."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import shoal
from shoal.bench.failure import Failure

if TYPE_CHECKING:
    from shoal.lab import Lab

# Importing torch takes a core two seconds: so many ranks on a few cores are forks of one process.
_FORKED_FROM: Final = 32

# In a cluster's hosts every port is free, but several jobs may be there at once.
_LAB_PORTS: Final = itertools.count(29500)


@dataclass(frozen=True)
class JobSpec:
    """Which processes: a library, how many ranks, and on how many hosts of a cluster.

    With `n_hosts` 0 all ranks are on this machine, outside any cluster. `rate_mbit` is that of a
    host's NIC; None: not shaped. `more_mbit` are those of further NICs of each host.
    """

    library: str
    n_ranks: int
    n_hosts: int = 0
    rate_mbit: float | None = 1000
    more_mbit: tuple[float, ...] = ()


@dataclass(frozen=True)
class Placement:
    """What the processes are started in: Open MPI's environment and, for hosts, the cluster."""

    openmpi: Path
    cluster: Lab | None = None


def start(
    spec: JobSpec, placement: Placement, control: Path, errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a job. Each connects to `control`.

    Raises:
        Failure: the library is not installed.
    """
    worker = ["-m", "shoal.bench.worker", spec.library, str(control)]
    if spec.library == "openmpi":
        return [_start_mpi(spec, placement.openmpi, worker, control.parent, errors)]
    job = _job_environment(spec, placement.cluster)
    argv = [sys.executable, *worker]
    if spec.n_ranks >= _FORKED_FROM and placement.cluster is None:
        return [_popen([*argv, "--fork", str(spec.n_ranks)], job, errors)]
    return [
        _popen(
            placement.cluster.command(_host_of(spec, rank), argv) if placement.cluster else argv,
            job | _rank_environment(spec, rank),
            errors,
        )
        for rank in range(spec.n_ranks)
    ]


def _start_mpi(
    spec: JobSpec, openmpi: Path, worker: Sequence[str], folder: Path, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    mpirun, python = openmpi / "bin" / "mpirun", openmpi / "bin" / "python"
    if not mpirun.exists():
        raise Failure(f"no Open MPI in {openmpi.name}: `make bench` installs it")
    # shoal is not installed there. A folder with nothing but a link to it makes the worker
    # importable and none of this environment's libraries.
    link = folder / "import" / "shoal"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(shoal.__file__).parent)
    count = ["-n", str(spec.n_ranks), "--oversubscribe", "--allow-run-as-root"]
    env = {"PYTHONPATH": str(link.parent)}
    return _popen([str(mpirun), *count, str(python), *worker], env, errors)


def _popen(
    argv: Sequence[str], env: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    # A process group of its own: an interrupt at the terminal reaches the launcher alone, which
    # stops its ranks in order. NOT a session: the scheduler shares the cores out by session, and
    # mpirun's ranks would get one share where other libraries' get one each.
    return subprocess.Popen(
        argv,
        env=everything,
        stdout=errors,
        stderr=errors,
        preexec_fn=os.setpgrp,  # noqa: PLW1509 - the launcher has one thread
    )


def _host_of(spec: JobSpec, rank: int) -> int:
    """Neighbouring ranks share a host, as torchrun places them."""
    return rank * spec.n_hosts // spec.n_ranks


def _rank_environment(spec: JobSpec, rank: int) -> dict[str, str]:
    on_host = [
        other for other in range(spec.n_ranks) if _host_of(spec, other) == _host_of(spec, rank)
    ]
    local = {"LOCAL_RANK": on_host.index(rank), "LOCAL_WORLD_SIZE": len(on_host)}
    return {name: str(value) for name, value in {"RANK": rank, **local}.items()}


def _job_environment(spec: JobSpec, cluster: Lab | None) -> dict[str, str]:
    job = {"WORLD_SIZE": str(spec.n_ranks)}
    if cluster is None:
        return job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return job | {
        "MASTER_ADDR": cluster.hosts[0].address,
        "MASTER_PORT": str(next(_LAB_PORTS)),
        "SHOAL_KEY": secrets.token_hex(32),
        **cluster.environment_of(0),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
