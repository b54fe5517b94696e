"""What ranks should hold alike is compared every so many steps; what differs is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from process.stage import error_of
from unit.in_process import in_ranks, run_well

from shoal.average import Averager
from shoal.errors import UsageError

if TYPE_CHECKING:
    import shoal

ODD = 1


def held() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "none": np.empty((0, 3)),
        "momentum": torch.ones(5, dtype=torch.bfloat16),
        "rate": 0.25,
        "betas": (0.9, 0.99),
    }


def spoilt(name: str) -> dict[str, Any]:
    values = held()
    if name == "a name more":
        values[name] = 1
    elif name == "another order":
        values = dict(reversed(values.items()))
    elif name == "rate":
        values[name] = 0.5
    else:
        values[name].reshape(-1)[-1] += 1
    return values


def step(averager: Averager) -> None:
    averager.begin()
    averager.ready("w")
    averager.wait()


def differ(group: shoal.Group, name: str) -> list[Exception | None]:
    averager = Averager(group, {"w": ((3, 4), "float32")}, check_same=2)
    errors = []
    for number in range(1, 5):
        step(averager)
        values = spoilt(name) if group.rank == ODD and number > 1 else held()
        errors.append(error_of(averager.check_same, values))
    return errors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w", "w is not the same on all ranks: float32[12] of hash "),
        ("momentum", "momentum is not the same on all ranks: bfloat16[5] of hash "),
        ("rate", "rate is not the same on all ranks: 0.25 on ranks 0, 2, 0.5 on rank 1"),
        ("a name more", "none on ranks 0, 2, 1 on rank 1"),
        ("another order", "the order of these names is not the same"),
    ],
)
def test_what_differs_is_named_on_every_rank_in_every_nth_step(name: str, words: str) -> None:
    for first, second, third, fourth in run_well(differ, 3, name):
        assert first is third is None
        for number, error in ((2, second), (4, fourth)):
            assert isinstance(error, UsageError), error
            assert words in str(error)
            assert f": in step {number} " in str(error)
            assert name == "another order" or " on ranks 0, 2, " in str(error)


@pytest.mark.parametrize("every", [0, 1, 2])
@in_ranks(3)
def test_equal_values_raise_nothing_and_without_a_number_nothing_is_compared(
    group: shoal.Group, every: int
) -> None:
    averager = Averager(group, {"w": ((3, 4), "float32")}, check_same=every)
    for number in range(3):
        step(averager)
        unlike = {"own": group.rank} if not every else {}
        averager.check_same(held() | {"rate": 0.5**number} | unlike)


@pytest.mark.parametrize("every", [-1, 1.5, "2"])
@in_ranks(1)
def test_a_wrong_number_of_steps_is_refused(group: shoal.Group, every: Any) -> None:
    with pytest.raises(UsageError, match="check_same must be a whole number of steps, or 0"):
        Averager(group, {"w": ((3,), "float32")}, check_same=every)
