"""Inputs of ranks for checks of the torch front end, and results by torch's own arithmetic."""

import functools
import operator
from collections.abc import Callable

import torch
import torch.distributed as dist

Tensor = torch.Tensor
Group = dist.ProcessGroup

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]

ARITHMETIC = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
FOLDS = [(dtype, fold) for dtype in FLOATS for fold in ARITHMETIC]
FOLDS += [(dtype, fold) for dtype in COMPLEX for fold in ("SUM", "AVG", "PRODUCT")]
FOLDS += [(dtype, fold) for dtype in INTEGERS for fold in ARITHMETIC + BITWISE]
FOLDS += [(torch.bool, fold) for fold in ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE)]

# The rounding of a fold over four ranks in any order: a few units in the last place.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-6, torch.complex64: 1e-6}


def given(dtype: torch.dtype, rank: int, n: int, seed: int = 0) -> Tensor:
    """Return a rank's values: small, so that no integer overflows, and near one, for products."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=source).bool()
    if dtype in INTEGERS:
        low = 0 if "uint" in str(dtype) else -3
        return torch.randint(low, 4, (n,), generator=source).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (1 + torch.randn(n, generator=source, dtype=wide) / 4).to(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return the values in the widest type of their kind, in which torch can compute everything."""
    if tensor.dtype is torch.bool:
        return tensor
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def folded(fold: str, tensors: list[Tensor]) -> Tensor:
    """Return the fold of all ranks' tensors, in the widest type."""
    parts = [wide(tensor) for tensor in tensors]
    if parts[0].dtype is torch.bool:
        fold = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(fold, fold)
    if fold == "AVG":
        total = functools.reduce(operator.add, parts)
        exact = total.is_floating_point() or total.is_complex()
        return total / len(parts) if exact else total.div(len(parts), rounding_mode="trunc")
    steps: dict[str, Callable[..., Tensor]] = {
        "SUM": operator.add,
        "PRODUCT": operator.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }
    return functools.reduce(steps[fold], parts)


def all_given(dtype: torch.dtype, group: Group, n: int, seed: int = 0) -> list[Tensor]:
    return [given(dtype, rank, n, seed) for rank in range(group.size())]


def unequal(group: Group) -> list[list[int]]:
    """Return lengths by rank: short ones, zero for some rank, and some above a segment."""
    n = group.size()
    return [list(range(1, n + 1)), [0, *[5] * (n - 1)], [70_000 + 333 * rank for rank in range(n)]]


def check_close(actual: Tensor, expected: Tensor) -> None:
    most = TOLERANCE.get(actual.dtype, 1e-14)
    torch.testing.assert_close(wide(actual), expected, rtol=most, atol=most, equal_nan=True)


def check_equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(wide(actual), wide(expected)), f"{actual} is not {expected}"


def reduced(group: Group, tensor: Tensor, fold: str = "SUM") -> Tensor:
    """Call the group's all_reduce: torch's function would turn complex tensors into real ones."""
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = getattr(dist.ReduceOp, fold), False
    group.allreduce([tensor], opts).wait()
    return tensor
