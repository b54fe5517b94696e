"""The commands that start the ranks of an MPI, on this machine or on the hosts of a lab.

An MPI lives in an environment of its own, with mpi4py and NumPy. On a cluster its launcher runs on
the first host and reaches the others by a script in the place of ssh, which enters their network
namespaces; each host gets a name of its own there, since MPIs know hosts by their names.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import shoal
from shoal.bench.job import Failure
from shoal.lab.cluster import INTERFACE

if TYPE_CHECKING:
    from shoal.bench.job import JobSpec
    from shoal.lab import Lab


class _Mpi(NamedTuple):
    title: str
    launcher: str


MPIS: Final[Mapping[str, _Mpi]] = {
    "openmpi": _Mpi("Open MPI", "mpirun"),
    "mpich": _Mpi("MPICH", "mpiexec"),
}
"""By the names of their libraries here, which are those of their packages."""


def mpi_command(
    spec: JobSpec, folders: Mapping[str, Path], cluster: Lab | None, scratch: Path
) -> list[str]:
    """Return the command that starts a Python for each rank; its arguments are to follow.

    `scratch` is a folder that lives as long as the job. Raises Failure without this MPI.
    """
    mpi = MPIS[spec.library]
    folder = folders.get(spec.library, Path(f".venv-{spec.library}"))
    launcher, python = (folder.absolute() / "bin" / name for name in (mpi.launcher, "python"))
    if not launcher.exists() or not python.exists():
        raise Failure(
            f"no {mpi.title} in {folder}. To install it there: python3 -m venv {folder} && "
            f"{folder}/bin/python -m pip install {spec.library} mpi4py numpy; "
            f"--{spec.library} DIR names another environment"
        )
    if cluster is None:
        here = ["--oversubscribe", "--allow-run-as-root"] * (spec.library == "openmpi")
        return [str(launcher), "-n", str(spec.n_ranks), *here, str(python)]
    options = _openmpi_hosts if spec.library == "openmpi" else _mpich_hosts
    agent = _write_agent(cluster, scratch)
    argv = [str(launcher), "-n", str(spec.n_ranks), *options(spec, cluster, agent), str(python)]
    return cluster.command(
        0, ["unshare", "--uts", str(agent), cluster.hosts[0].address, shlex.join(argv)]
    )


def mpi_environment(spec: JobSpec, scratch: Path) -> dict[str, str]:
    """Return the environment of the launcher and its ranks."""
    # shoal is not installed there. A folder with nothing but a link to it makes the worker
    # importable and none of this environment's libraries.
    link = scratch / "import" / "shoal"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(shoal.__file__).parent)
    environ = {"PYTHONPATH": str(link.parent)}
    if spec.library == "mpich" and spec.n_hosts:
        # Hosts of a cluster share a kernel: UCX would find its shared memory across them.
        environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
    return environ


def _openmpi_hosts(spec: JobSpec, cluster: Lab, agent: Path) -> Sequence[str]:
    n_each = spec.n_ranks // spec.n_hosts
    hosts = ",".join(f"{host.address}:{n_each}" for host in cluster.hosts[: spec.n_hosts])
    return [
        *("--host", hosts, "--map-by", "slot", "--bind-to", "none", "--allow-run-as-root"),
        *("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(agent)),
        *("--prtemca", "plm_ssh_no_tree_spawn", "1"),
        *("--prtemca", "prte_if_include", INTERFACE),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
        *("--mca", "btl_tcp_if_include", INTERFACE, "-x", "PYTHONPATH"),
        *("--mca", "mpi_yield_when_idle", "1"),  # it does not see that hosts share the cores
    ]


def _mpich_hosts(spec: JobSpec, cluster: Lab, agent: Path) -> Sequence[str]:
    n_each = str(spec.n_ranks // spec.n_hosts)
    hosts = ",".join(f"{host.address}:{n_each}" for host in cluster.hosts[: spec.n_hosts])
    return [
        *("-hosts", hosts, "-ppn", n_each, "-launcher", "ssh", "-launcher-exec", str(agent)),
        *("-iface", INTERFACE, "-disable-hostname-propagation"),
    ]


def _write_agent(cluster: Lab, scratch: Path) -> Path:
    """A script in the place of ssh: options, a host's address, and a command for its shell."""
    agent = scratch / "agent"
    cases = "\n".join(
        f"  {host.address}) number={host.index} space={host.namespace};;" for host in cluster.hosts
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
