"""Random training programs by shoal's DistributedDataParallel end as by torch's, or with an error.

After every action the parameters have the same bits on all ranks, and are close to what torch's
wrapper over Gloo gives and to what the mean of all ranks' gradients gives; what a program kept
holds what it held. Where an action may be refused, every rank may raise an error instead, but none
waits for its deadline.

`SHOAL_SOAK=1` runs new programs for an hour, also with every rank on a host of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from process.ranks import run_ranks, start_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_actions import ACTIONS
from process.ddp_fuzz import Finding, Program, draw, find, judged, shorter
from process.ddp_models import MeanOfGradients

N_QUICK = {2: 100, 4: 20}  # programs, by the number of ranks
SOAK_S = 1800  # for each placing of the ranks
_N_CUTS = 20


def run(programs: Sequence[Program]) -> list[Finding]:
    """What this rank finds, up to the first program in which something is wrong or refused."""
    import shoal.torch

    if os.environ.get("APART"):
        os.environ["SHOAL_HOST_ID"] = os.environ["RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    findings = []
    for number, program in enumerate(programs):
        print(f"program {number}", flush=True)  # noqa: T201 - a rank that dies has said where
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        findings.append(find(program, shoal.torch.DistributedDataParallel, gloo))
        if findings[-1].error or not _all_go_on(findings[-1], gloo):
            break  # and leave the group, as a program does that ends with an error
        dist.destroy_process_group(gloo)
    return findings


def _all_go_on(finding: Finding, gloo: dist.ProcessGroup) -> bool:
    found: list[str] = [""] * dist.get_world_size()
    try:
        dist.all_gather_object(found, finding.difference, group=gloo)
    except RuntimeError:  # another rank has left
        return False
    return not any(found)


def verdicts(programs: Sequence[Program], apart: str = "") -> Iterator[tuple[Program, str]]:
    """Each program, and what is wrong with it; empty if nothing is."""
    left = list(programs)
    while left:
        with start_ranks(run, left[0].size, left, env={"APART": apart}) as ranks:
            outcomes = ranks.wait(120 + len(left))
        failed = [outcome for outcome in outcomes if outcome.error or outcome.died]
        if failed:
            at = failed[0].output.count("program ") - 1
            done = [(p, "") for p in left[:at]] + [(left[at], "\n".join(map(str, failed)))]
        else:
            by_program = zip(*(outcome.value for outcome in outcomes), strict=True)
            done = [(p, judged(p, found)) for p, found in zip(left, by_program, strict=False)]
        yield from done
        left = left[len(done) :]


def shortest(program: Program, why: str, apart: str) -> str:
    """The failing program, cut down as far as it still fails, and how."""
    for _ in range(_N_CUTS):
        failing = ((p, w) for p, w in verdicts(list(shorter(program)), apart) if w)
        found = next(failing, None)
        if found is None:
            break
        program, why = found
    return f"{why}\n\n{program}"


def fails(programs: Sequence[Program], apart: str = "") -> None:
    """Raise what the first failing program shows.

    Raises:
        AssertionError: with the shortest program found that fails.
    """
    for program, why in verdicts(programs, apart):
        if why:
            raise AssertionError(f"seed {program.seed}: {shortest(program, why, apart)}")


class Local(MeanOfGradients):
    """Averages nothing."""

    def average(self) -> None:
        pass


def find_local(program: Program) -> Finding:
    dist.init_process_group("gloo")
    return find(program, Local, dist.group.WORLD)


def test_a_wrapper_that_averages_nothing_is_found() -> None:
    actions = ("a_pass_is_averaged", 0), ("the_optimizer_steps", 1)
    program = Program(0, 2, (), {}, "SGD", actions)
    findings = run_ranks(find_local, 2, program)
    assert judged(program, findings).startswith("rank 0: after a_pass_is_averaged, gradient of")


def quick(size: int) -> list[Program]:
    return [draw(seed, size) for seed in range(N_QUICK[size])]


def test_every_action_is_in_a_program_of_the_suite() -> None:
    drawn = {name for size in N_QUICK for one in quick(size) for name, _ in one.actions}
    assert drawn == ACTIONS.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", N_QUICK)
def test_random_programs_end_as_by_torchs_wrapper_or_with_an_error(size: int) -> None:
    fails(quick(size))


@pytest.mark.timeout(2 * SOAK_S)
@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: an hour")
@pytest.mark.parametrize("apart", ["", "1"])
def test_many_random_programs_end_as_by_torchs_wrapper_or_with_an_error(apart: str) -> None:
    until = time.monotonic() + SOAK_S
    for first in itertools.count(10_000, 100):
        for size in (2, 4):
            if time.monotonic() > until:
                return
            fails([draw(seed, size) for seed in range(first, first + 100)], apart)
