"""Random models have the bits of torch's DistributedDataParallel over Gloo, in every step.

`SHOAL_SOAK=1` runs many of them, also with every rank on a host of its own.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_fuzz import Case, trained
from process.ddp_training import assert_same_bits, start
from torch import nn

N_QUICK = 12
N_SOAK = 200


def train_both(first: int, count: int) -> None:
    import shoal.torch

    if os.environ.get("APART"):
        os.environ["SHOAL_HOST_ID"] = os.environ["RANK"]
    torch.set_num_threads(1)
    start()
    gloo = dist.new_group(backend="gloo")
    for seed in range(first, first + count):
        case = Case.draw(seed)
        theirs = trained(
            case, lambda net, **o: nn.parallel.DistributedDataParallel(net, process_group=gloo, **o)
        )
        ours = trained(case, shoal.torch.DistributedDataParallel)
        try:
            assert_same_bits(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
    dist.destroy_process_group()


def test_random_models_have_the_bits_of_torchs_wrapper() -> None:
    run_ranks(train_both, 2, 0, N_QUICK)


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes")
@pytest.mark.parametrize("apart", ["", "1"])
@pytest.mark.parametrize("size", [2, 4])
def test_many_random_models_have_the_bits_of_torchs_wrapper(size: int, apart: str) -> None:
    run_ranks(train_both, size, 1000, N_SOAK, env={"APART": apart}, deadline_s=550)
