"""The real environment of each launcher, and errors about wrong ones."""

import pytest

from shoal.errors import UsageError
from shoal.rendezvous.environment import LaunchInfo, find_place, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[03-04]"}


def test_each_launcher_is_understood() -> None:
    for environ, want in (
        (TORCHRUN, LaunchInfo(3, 4, "10.0.0.1", 29501)),
        (OPEN_MPI, LaunchInfo(1, 2, "127.0.0.1", 29500)),
        (HYDRA, LaunchInfo(0, 2, "127.0.0.1", 29500)),
        (SLURM, LaunchInfo(5, 8, "node03", 29500)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}, LaunchInfo(5, 8, "head", 7)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, LaunchInfo(5, 8, "127.0.0.1", 29500)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, LaunchInfo(5, 6, "node03", 29500)),
        (SLURM | {"WORLD_SIZE": "8"}, LaunchInfo(5, 8, "node03", 29500)),
        # One launcher starts another: torchrun, then Open MPI, then Slurm counts.
        (SLURM | OPEN_MPI | TORCHRUN, LaunchInfo(3, 4, "10.0.0.1", 29501)),
        (SLURM | OPEN_MPI, LaunchInfo(1, 2, "127.0.0.1", 29500)),
    ):
        assert find_place(environ) == want


def test_jobs_and_steps_of_slurm_on_one_host_get_different_ports() -> None:
    def port(job: int, step: int) -> int:
        # As `srun` of Slurm 22.05 sets them, equal for all tasks of a step.
        ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return find_place(SLURM | ids).master_port

    ports = {port(job, step) for job in range(4_999_500, 5_000_500) for step in range(10)}
    assert len(ports) == 10_000
    assert all(1024 < port < 32768 for port in ports)  # free for listeners, by Linux's default
    assert find_place(SLURM | {"SLURM_JOB_ID": "7"}).master_port == port(7, 0)
    assert find_place(SLURM | {"SLURM_JOB_ID": "7", "MASTER_PORT": "9"}).master_port == 9


def test_a_wrong_environment_is_refused_by_name() -> None:
    for environ, names in (
        ({}, ["RANK", "OMPI_COMM_WORLD_RANK", "torchrun"]),
        (TORCHRUN | {"RANK": "x"}, ["RANK='x'", "not an integer", "from 0 to 3"]),
        (TORCHRUN | {"RANK": "1_0"}, ["RANK='1_0'", "not an integer"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "out of range", "from 0 to 3", "WORLD_SIZE=4"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK=-1", "out of range"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
        (TORCHRUN | {"WORLD_SIZE": ""}, ["WORLD_SIZE is not set"]),
        (TORCHRUN | {"MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "from 1 to 65535"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["MASTER_PORT is not set"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is not set", "127.0.0.1"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ["MASTER_ADDR", "Open MPI", "all 2"]),
        (SLURM | {"SLURM_STEP_NODELIST": "odd]["}, ["MASTER_ADDR", "Slurm"]),
    ):
        with pytest.raises(UsageError) as caught:
            find_place(environ)
        for name in names:
            assert name in str(caught.value)


def test_the_first_host_of_a_node_list() -> None:
    first = {"gpu-3": "gpu-3", "a,b": "a", "node[03-07,9],gpu1": "node03"}
    first |= {"node[5]-ib": "node5-ib", "r[1-2]n[10,12]": "r1n10"}
    first |= {"": None, "[": None, "node[a-b]": None}
    assert {nodelist: first_host(nodelist) for nodelist in first} == first
