"""Random training programs end with shoal's DistributedDataParallel as with torch's, or fail.

After every action the parameters have the same bits on all ranks, and are close to those of torch's
wrapper over Gloo and of an oracle that averages all ranks' gradients. Tensors that a program keeps
do not change. Where an action may be refused, every rank may raise an error instead, and no rank
waits for its deadline.

`SHOAL_SOAK=1` runs new programs for an hour, also with every rank on a separate host.
"""

import itertools
import os
import time
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from process.ddp_fuzz import Finding, Program, draw, every_pass, find, judged
from process.shared_ranks import SharedRanks

# Numbers of ranks and seeds, in parts that several workers of pytest run in parallel.
QUICK = [(1, range(0)), (2, range(98, 133)), (4, range(133, 143))]
# Options, and features of the models.
EVERY_WAY = [
    ({}, ()),
    ({}, ("penalty",)),
    ({"bucket_cap_mb": None}, ("view",)),
    ({"gradient_as_bucket_view": True}, ()),
    ({"find_unused_parameters": True}, ()),
    ({"static_graph": True}, ()),
    ({"static_graph": True}, ("reentrant",)),
    ({"weighted": True, "bucket_cap_mb": None}, ()),
]
SOAK_S = 1800  # for each placing of the ranks


def find_in_rank(program: Program) -> Finding:
    import shoal.torch

    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    return find(program, shoal.torch.DistributedDataParallel, gloo)


def verdict(program: Program, ranks: SharedRanks) -> str:
    """Describe the fault of a program; empty if there is none."""
    try:
        findings = ranks.run(find_in_rank, program)
    except AssertionError as error:  # a rank raised, died or hung
        return str(error)
    return judged(program, findings)


def check(programs: Iterable[Program], ranks: SharedRanks) -> None:
    """Fail with the first failing program."""
    for program in programs:
        why = verdict(program, ranks)
        assert not why, f"seed {program.seed}: {why}\n\n{program}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "seeds"), QUICK, ids=str)
def test_programs_end_as_with_torchs_or_in_an_error(size: int, seeds: range) -> None:
    """Make passes of every kind in every way, and run random programs."""
    with SharedRanks(size) as ranks:
        check((every_pass(size, options, *features) for options, features in EVERY_WAY), ranks)
        check((draw(seed, size) for seed in seeds), ranks)


@pytest.mark.timeout(2 * SOAK_S)
@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: an hour")
@pytest.mark.parametrize("is_apart", [False, True])
def test_many_random_programs_end_as_with_torchs_or_in_an_error(is_apart: bool) -> None:
    until = time.monotonic() + SOAK_S
    env = {"RANKS_PER_HOST": "1"} if is_apart else {}
    with SharedRanks(2, **env) as two, SharedRanks(4, **env) as four:
        for seed in itertools.count(10_000):
            if time.monotonic() > until:
                return
            for ranks in (two, four):
                check([draw(seed, ranks.size)], ranks)
