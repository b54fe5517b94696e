"""Reads this process's rank and its job's size and master from the launcher's variables.

Supports four launchers, in this order: torchrun (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
`MASTER_PORT`; also if set by hand), Open MPI, PMI (MPICH, Intel MPI), Slurm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from shoal.errors import UsageError

# The port of torch's own examples, for launchers that do not choose one. Of two jobs with the same
# first host, one must set MASTER_PORT.
DEFAULT_MASTER_PORT: Final = 29500
_SLURM_PORTS: Final = range(20000, 30000)  # below the ports that Linux gives to connections
_JOBS_PER_STEP: Final = 1000


class LaunchInfo(NamedTuple):
    """One process's place in a job."""

    rank: int
    size: int
    master_addr: str
    master_port: int


class _Launcher(NamedTuple):
    """A launcher's variables; of several names for the size, the first one that is set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_size: str


_LAUNCHERS: Final = (
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PMI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALNRANKS"),
    # The step's count first: inside `srun -n 2` of a larger allocation, SLURM_NTASKS may be the
    # allocation's count.
    _Launcher("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ""),
)


def find_place(environ: Mapping[str, str] = os.environ, *, otherwise: str = "") -> LaunchInfo:
    """Return this process's place, from the first launcher whose rank variable is set.

    `otherwise` is another way to start, for messages.

    Raises UsageError if there is no such launcher, or for a missing or wrong variable: names it,
    its value and the expected values.
    """
    launcher = next((found for found in _LAUNCHERS if environ.get(found.rank)), None)
    if launcher is None:
        raise UsageError(
            "no launcher found: RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are all "
            "unset. Start with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR "
            f"and MASTER_PORT{otherwise}"
        )
    size_name = next((name for name in launcher.size if environ.get(name)), launcher.size[-1])
    size = _number(environ, size_name, 1, None, f"the number of ranks, as {launcher.name} sets it")
    rank = _number(environ, launcher.rank, 0, size - 1, f"this rank ({size_name}={size})")
    return LaunchInfo(rank, size, _master_addr(environ, launcher, size), _port(environ, launcher))


def first_host(nodelist: str) -> str | None:
    """Return the first host of a Slurm list, `node[03-07,9],gpu1` -> `node03`; None if unclear."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+(?=,|$)", nodelist)
    if first is None:
        return None
    host = re.sub(r"\[(\d+)(?:[-,][\d,-]*)?\]", r"\1", first.group())
    return host if re.fullmatch(r"[A-Za-z0-9._-]+", host) else None


def _master_addr(env: Mapping[str, str], launcher: _Launcher, size: int) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if launcher.name == "torchrun":
        raise UsageError(
            "MASTER_ADDR is not set although RANK is: set it to the name or address of the host "
            "of rank 0 (127.0.0.1 if all ranks are on one host)"
        )
    if _all_local(env, launcher, size):
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        host = first_host(env.get(name, ""))
        if host is not None:
            return host
    raise UsageError(
        f"MASTER_ADDR is not set, and {launcher.name}'s variables do not show that all {size} "
        "ranks are on one host: set it to the name or address of rank 0's host, on every rank"
    )


def _all_local(env: Mapping[str, str], launcher: _Launcher, size: int) -> bool:
    if size == 1:
        return True
    if env.get(launcher.local_size):
        return _number(env, launcher.local_size, 1, size, "the ranks on this host") == size
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if env.get(name):
            return _number(env, name, 1, None, "the number of hosts") == 1
    return False


def _port(env: Mapping[str, str], launcher: _Launcher) -> int:
    if launcher.name == "torchrun" or env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT", 1, 65535, "a free TCP port on the host of rank 0")
    if launcher.name == "Slurm" and env.get("SLURM_JOB_ID"):
        return _slurm_port(env)
    return DEFAULT_MASTER_PORT


def _slurm_port(env: Mapping[str, str]) -> int:
    """Return a port for a step; ten steps of each of 1,000 consecutive jobs get different ones."""
    job = _number(env, "SLURM_JOB_ID", 0, None, "the number of the job")
    steps = {"SLURM_STEP_ID": "0", **env}
    step = _number(steps, "SLURM_STEP_ID", 0, None, "the number of the step")
    return _SLURM_PORTS[(job + _JOBS_PER_STEP * step) % len(_SLURM_PORTS)]


def _number(env: Mapping[str, str], name: str, low: int, high: int | None, what: str) -> int:
    bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
    wanted = f"an integer {bounds}: {what}"
    text = env.get(name, "")
    if not text:
        raise UsageError(f"{name} is not set; expected {wanted}")
    # No int(): it also takes "1_0", " 1 " and digits of other scripts.
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise UsageError(f"{name}={text!r} is not an integer; expected {wanted}")
    number = int(text)
    if number < low or (high is not None and number > high):
        raise UsageError(f"{name}={text} is out of range; expected {wanted}")
    return number
