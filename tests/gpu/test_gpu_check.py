"""Tensors of CUDA where a GPU is; elsewhere, that the program which checks them works itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).parents[2] / "bench" / "gpu" / "check.py"
HAS_GPU = torch.cuda.is_available()


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU here; elsewhere run `make gpu-check`")
def test_every_collective_is_right_on_the_gpu() -> None:
    done = check("--only", "correct", "--ranks", "3", "--hosts", "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_check_says_where_there_is_no_gpu_and_ends_with_a_status_of_its_own() -> None:
    done = check()
    assert done.returncode == 77
    assert done.stdout.startswith("gpu-check: SKIPPED, no GPU here")


def test_a_machine_with_one_gpu_says_aloud_that_nccl_in_a_host_is_not_run() -> None:
    done = check("--device", "cpu", "--gpus", "1", "--only", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    for n_gpus in (2, 4, 8):
        assert f"SKIPPED: it takes {n_gpus} GPUs, and here are 1." in done.stdout
    assert "NCCL in a host was not run in this shape." in done.stdout


@pytest.mark.skipif("SHOAL_SOAK" not in os.environ, reason="30 s of a core; set SHOAL_SOAK=1")
def test_the_check_itself_works_and_writes_its_report(tmp_path: Path) -> None:
    how = [
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--longest",
        "5000",
        "--bytes",
        "4096",
        "--seconds",
        "0.01",
    ]
    how += ["--gpus", "2", "--hosts", "2"]
    done = check(*how, "--only", "correct,speed,local", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\| 2 \| [0-9]+ \| none \|", done.stdout)
    assert re.search(r"\| 2 on as many hosts \| [0-9]+ \| none \|", done.stdout)
    assert "| all_reduce | 4096 |" in done.stdout
    assert "hosts x GPUs of each, 1 x 2\n\n6 checks passed; failed: 0" in done.stdout
    assert (tmp_path / "report.md").read_text() == done.stdout.rstrip("\n") + "\n"
    assert (tmp_path / "report.json").exists()
