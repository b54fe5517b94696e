"""The order of folds in sharded reduction, written without shoal (docs/bits.md)."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

FLOOR_BYTES = 16 * 1024
LINE_BYTES = 64


def stripes(
    n_elems: int, item: int, n_workers: int, block: int = 1
) -> list[tuple[slice, list[int]]]:
    """Return every stripe of a buffer: its place, and its workers in the order of folds.

    Args:
        block: the elements of a block of the wire's codec, all in one stripe.
    """
    n = max(1, min(n_workers, n_elems * item // FLOOR_BYTES))
    line = max(block, LINE_BYTES // item)
    length = math.ceil(math.ceil(n_elems / n) / line) * line if n > 1 else n_elems
    ends = [min(length * (t + 1), n_elems) for t in range(n)]
    return [
        (slice(begin, end), order_of(t, n_workers, n))
        for t, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def order_of(stripe: int, n_workers: int, n_stripes: int) -> list[int]:
    """Return the order: from the first worker down, and round."""
    first = stripe * n_workers // n_stripes
    return [(first - k) % n_workers for k in range(n_workers)]


def nested(order: Sequence[Any]) -> Any:
    """Return the fold of these workers in this order, as proofs write it."""
    return functools.reduce(lambda held, one: (held, one), order[1:], order[0])


def folded(values: Sequence[np.ndarray], fold: np.ufunc = np.add, block: int = 1) -> np.ndarray:
    """Return the exact result of every rank, where rank r contributes `values[r]`."""
    result = np.empty_like(values[0])
    for where, order in stripes(values[0].size, values[0].itemsize, len(values), block):
        held = values[order[0]][where].copy()
        for rank in order[1:]:
            held = fold(held, values[rank][where])
        result[where] = held
    return result


def own(rank: int, n_elems: int, dtype: str = "float32") -> np.ndarray:
    """Return numbers of such different sizes that the sum depends on the order of addition."""
    random = np.random.default_rng([rank, n_elems])
    signs = random.choice([-1.0, 1.0], n_elems)
    return (signs * random.lognormal(0, 4, n_elems)).astype(dtype)
