"""Starts the ranks of each library: command, environment, place."""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from shoal.bench.job import Failure, JobSpec, host_of, rank_environment

if TYPE_CHECKING:
    from shoal.lab import Lab

_WORKER: Final = "shoal.bench.worker"

# Importing torch takes a core two seconds, so this many ranks or more are forked from one process.
_FORKED_FROM: Final = 32

# Every port of a lab's hosts is free, but several jobs may run there at once.
_LAB_PORTS: Final = itertools.count(29500)


Launcher = Callable[[JobSpec, "Lab | None", Path], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Placement:
    """The surroundings of a job's processes.

    Args:
        cluster: the lab of a job with hosts.
        environ: more variables of its ranks; empty: a new key on hosts.
        program: runs one rank; its arguments are the library and the path of `control`.
        launchers: for libraries with their own launcher: a function of the job, its lab and a
            folder for scratch files that returns the command, without the rank's arguments to
            Python, and its variables.
    """

    cluster: Lab | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    program: str = _WORKER
    launchers: Mapping[str, Launcher] = field(default_factory=dict)


def start(
    spec: JobSpec, placement: Placement, control: Path, errors: IO[bytes], port: int
) -> list[subprocess.Popen[bytes]]:
    """Start a job's processes, which connect to `control`; Failure if a library is missing.

    Without a lab the ranks meet at `port`, which the caller holds.
    """
    words = [spec.library, str(control)]
    if launcher := placement.launchers.get(spec.library):
        argv, environ = launcher(spec, placement.cluster, control.parent)
        return [_popen([*argv, "-m", placement.program, *words], environ, errors)]
    require_torch(spec.library)
    job = _job_environment(spec, placement, port)
    argv = [sys.executable, "-m", placement.program, *words]
    if spec.n_ranks >= _FORKED_FROM and placement.cluster is None:
        return [_popen([*argv, "--fork", str(spec.n_ranks)], job, errors)]
    return [
        _popen(
            placement.cluster.command(host_of(spec, rank), argv) if placement.cluster else argv,
            job | _rank_environment(spec, rank),
            errors,
        )
        for rank in range(spec.n_ranks)
    ]


def require_torch(library: str) -> None:
    """Raise Failure if a library is called through torch, which is not installed."""
    if library in ("gloo", "shoal") and importlib.util.find_spec("torch") is None:
        raise Failure(f"{library} needs torch, which is not installed: pip install torch")


def _popen(
    argv: Sequence[str], env: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    # A new process group: an interrupt at the terminal reaches only the launcher, which stops its
    # ranks in order. NOT a session: the scheduler shares the cores by session, and all ranks of
    # mpirun would get one share, but other libraries' ranks one share each.
    return subprocess.Popen(
        argv,
        env=everything,
        stdout=errors,
        stderr=errors,
        preexec_fn=os.setpgrp,  # noqa: PLW1509 - the launcher has one thread
    )


def _rank_environment(spec: JobSpec, rank: int) -> dict[str, str]:
    on_host = [
        other for other in range(spec.n_ranks) if host_of(spec, other) == host_of(spec, rank)
    ]
    return rank_environment(rank, on_host.index(rank), len(on_host))


def _job_environment(spec: JobSpec, placement: Placement, port: int) -> dict[str, str]:
    job, cluster = {"WORLD_SIZE": str(spec.n_ranks)}, placement.cluster
    if cluster is None:
        return job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return job | {
        "MASTER_ADDR": cluster.hosts[0].address,
        "MASTER_PORT": str(next(_LAB_PORTS)),
        **cluster.environment_of(0, range(spec.n_hosts)),
        **(placement.environ or {"SHOAL_KEY": secrets.token_hex(32)}),
    }
