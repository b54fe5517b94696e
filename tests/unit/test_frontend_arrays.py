"""The core of the front ends for array frameworks, with NumPy arrays and ranks as threads."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from ml_dtypes import bfloat16
from unit.in_process import in_ranks, run_well

import shoal
from shoal.average import ErrorFeedback
from shoal.frontend import arrays
from shoal.group.group import Group

SIZE = 2


def given_by(rank: int) -> dict[str, Any]:
    """Return arrays of several types, whose averages are exact."""
    return {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3).T * (rank + 1),  # not contiguous
        "half": np.full(3, 2 * rank, np.float16),
        "brain": np.full((2, 2), 2 * rank, bfloat16),
        "number": np.array(4.0 * rank),
        "empty": np.zeros((0, 3), np.float32),
        "ints": np.array([2, 4], np.int32),
    }


AVERAGES = {
    "matrix": [[0, 4.5], [1.5, 6], [3, 7.5]],
    "half": [1, 1, 1],
    "brain": [[1, 1], [1, 1]],
    "number": 2,
    "empty": np.zeros((0, 3)),
    "ints": [2, 4],
}


def average(group: Group, given: dict[str, Any], **options: Any) -> dict[str, Any]:
    results = {name: array.copy("K") for name, array in given.items()}
    arrays.average(group, list(results.values()), list(given), options)
    return results


@in_ranks(SIZE)
def test_arrays_of_all_types_and_shapes_are_averaged(group: Group) -> None:
    for _ in range(3):  # the layout changes after the first step
        for name, result in average(group, given_by(group.rank)).items():
            assert result.tolist() == np.asarray(AVERAGES[name]).tolist(), name


@in_ranks(SIZE)
def test_different_names_shapes_and_options_have_different_averagers(group: Group) -> None:
    value = np.full(2, group.rank, np.float32)
    for _ in range(2):
        for given in ({"a": value}, {"b": value}, {"a": value.reshape(1, 2)}):
            for options in ({}, {"wire": "bf16"}, {"compress": "bf16"}):
                for result in average(group, given, **options).values():
                    assert result.ravel().tolist() == [0.5, 0.5]


@in_ranks(SIZE)
def test_shapes_used_once_leave_no_averager(group: Group) -> None:
    for length in (*range(1, 100), 1):
        given = {"a": np.full(length, float(group.rank))}
        assert average(group, given)["a"].tolist() == [0.5] * length
    assert len(group.kept) < 50


def averages_in(group: Group) -> weakref.ref[Group]:
    average(group, {"a": np.zeros(1000)})
    average(group.subgroup(range(SIZE), "all"), {"a": np.zeros(1000)})
    return weakref.ref(group)


def test_no_averager_keeps_a_closed_group() -> None:
    groups = run_well(averages_in, SIZE)
    gc.collect()
    assert [group() for group in groups] == [None] * SIZE


@in_ranks(1)
def test_an_unknown_type_is_refused_by_name(group: Group) -> None:
    with pytest.raises(shoal.UsageError, match=r"^'words': unknown dtype"):
        average(group, {"words": np.array(["a"])})


@pytest.mark.parametrize("where", ["the first agreement", "a step"])
@in_ranks(SIZE)
def test_ctrl_c_in_an_average_raises_on_every_rank(group: Group, where: str) -> None:
    given, interrupt = {"a": np.ones(3)}, Mock(side_effect=KeyboardInterrupt)
    if where == "a step":
        average(group, given)
    if group.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            if where == "a step":
                ((averager, _),) = group.kept.values()
                patch.setattr(averager, "ready", interrupt)
            else:
                patch.setattr(group, "all_gather", interrupt)
            with pytest.raises(KeyboardInterrupt):
                average(group, given)
    for _ in range(2):
        with pytest.raises(shoal.UsageError, match=r"KeyboardInterrupt interrupted .* on rank 1"):
            average(group, given)


@in_ranks(SIZE)
def test_broadcast_overwrites_all_arrays_with_the_roots(group: Group) -> None:
    given = given_by(group.rank)
    given["matrix"] = np.ascontiguousarray(given["matrix"])
    values = list(given.values())
    arrays.broadcast(group, values, list(given), 1)
    for value, wanted in zip(values, given_by(1).values(), strict=True):
        assert value.tolist() == wanted.tolist()


@in_ranks(SIZE)
def test_broadcast_refuses_differing_arrays_and_the_group_stays_usable(group: Group) -> None:
    ones = [np.ones(1 + group.rank)]
    with pytest.raises(shoal.UsageError, match=r"'a' is not the same on all ranks"):
        arrays.broadcast(group, ones, ["a"], 0)
    with pytest.raises(shoal.UsageError, match="root is not the same on all ranks"):
        arrays.broadcast(group, [], [], group.rank)
    group.barrier()


@in_ranks(1)
def test_averagers_with_residuals_outlast_others(group: Group) -> None:
    fed = {"compress": ErrorFeedback("mxfp4")}
    given = np.array([6.0, 0.25], np.float32)  # 4-bit values with one scale: 6 and 0, or 6 and 0.5
    assert average(group, {"fed": given}, **fed)["fed"].tolist() == [6, 0]
    for length in range(40):
        average(group, {"other": np.ones(length + 1, np.float32)})
    assert average(group, {"fed": given}, **fed)["fed"].tolist() == [6, 0.5]
