"""What the cases that run over shoal and over Gloo share: inputs, comparison, who runs them.

A file of cases has functions called `case_`. Each runs in every one of three ranks, once in a shoal
group and once in a Gloo group beside it, on the same inputs, and returns what it got; the two must
be alike. Each is reported as a test of its own; the processes are started once per file.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup

SIZE = 3

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
GATHERED = [*FLOATS, *INTEGERS]  # Gloo gathers no others
MOVED = [*GATHERED, torch.bool, torch.complex64, torch.complex128]

# How many rows rank r gives to rank t: ROWS[r][t].
ROWS = [[2, 0, 1], [3, 1, 0], [0, 4, 2]]

# Gloo folds in another order.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a rank puts in: small, so that no integer overflows."""
    source = torch.Generator().manual_seed(100 * seed + rank)
    whole = torch.randint(0, 4, shape, generator=source)
    if dtype in INTEGERS or dtype is torch.bool:
        return whole.to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (whole + torch.rand(shape, generator=source, dtype=wide)).to(dtype)


def ours(group: Group) -> bool:
    return dist.get_backend(group) == "shoal"


def other_way(group: Group, async_op: bool, call: Callable[..., Any]) -> None:
    """Make a call that waits, or one whose Work is waited for."""
    work = call(group=group, async_op=async_op)
    if async_op:
        work.wait()


def raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whichever: it is what is tested
        return error
    return None


def check_alike(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        tolerance = TOLERANCE.get(got.dtype, 1e-12 if got.is_floating_point() else 0)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_alike(one, other)
    else:
        assert got == expected


Cases = Mapping[str, Callable[[Any], Any]]


def cases_in(names: Mapping[str, Any]) -> Cases:
    """A file's cases, given its globals."""
    every = names.items()
    return {name.removeprefix("case_"): case for name, case in every if name.startswith("case_")}


def run_cases(cases: Cases) -> dict[str, str]:
    """In a rank: how each case failed, "" if it did not."""
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    failures = {}
    for name, case in cases.items():
        mine, theirs = (
            dist.new_group(backend=backend, timeout=timedelta(seconds=10))
            for backend in ("shoal", "gloo")
        )
        try:
            check_alike(case(mine), case(theirs))
            failures[name] = ""
        except Exception:  # noqa: BLE001 - the other cases go on
            failures[name] = traceback.format_exc()
        dist.barrier()  # the next case begins together, even if this one failed here only
    dist.destroy_process_group()
    return failures


def assert_passed(failures: list[dict[str, str]], case: str) -> None:
    """In the test: no rank has failed this case."""
    failed = [f"rank {rank}: {each[case]}" for rank, each in enumerate(failures) if each[case]]
    assert not failed, "\n".join(failed)
