"""NumPy arrays for ranks to exchange: their placement, contents and expected results."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

import shoal
from shoal.dtypes import DType, Op

Array = np.ndarray[Any, np.dtype[Any]]
Memory = Callable[[int, Any], Array]

DTYPES = [dtype for dtype in DType if dtype is not DType.BFLOAT16]  # NumPy has no such type
BITWISE = {Op.BAND: np.bitwise_and, Op.BOR: np.bitwise_or, Op.BXOR: np.bitwise_xor}
FOLDS = {Op.SUM: np.add, Op.PRODUCT: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum, **BITWISE}


def ones(n_elems: int, value: float = 1.0) -> Array:
    return np.full(n_elems, value, np.float32)


def numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype("bool" if dtype is DType.BOOL else str(dtype))


def contribution(rank: int, n_elems: int, dtype: Any = np.float32) -> Array:
    """Return small integers, whose sums and products are exact in every type."""
    signed = np.dtype(dtype).kind not in "ub"
    # The period is a prime, so that no two pieces of a message are equal.
    pattern = ((np.arange(997) * 7 + rank * 3) % 5 - 2 * signed).astype(dtype)
    if pattern.dtype.kind == "c":
        pattern *= 1 + 2j
    return np.resize(pattern, n_elems)


def folded(blocks: list[Array], op: Op) -> Array:
    """Return NumPy's result, in the blocks' type."""
    dtype = blocks[0].dtype
    if op is Op.AVG:
        total = np.add.reduce(blocks, dtype=dtype)
        if dtype.kind in "iu":
            return np.trunc(total / len(blocks)).astype(dtype)
        return total / dtype.type(len(blocks))
    return FOLDS[op].reduce(blocks, dtype=dtype)


def exists(dtype: DType, op: Op) -> bool:
    kind = numpy_type(dtype).kind
    if op in BITWISE:
        return kind in "iub"
    if op in (Op.MIN, Op.MAX):
        return kind != "c"
    return (op, kind) != (Op.AVG, "b")


def check(found: Any, want: Any, what: str = "") -> None:
    if not np.array_equal(found, want):  # assert_array_equal is ten times slower for equal arrays
        np.testing.assert_array_equal(found, want, err_msg=what)


def check_sum(group: shoal.Group, turn: int = 0, n_elems: int = 10_007) -> None:
    """Sum one array of each rank of the first view, and compare with NumPy's sum."""

    def values(rank: int) -> Array:
        return np.random.default_rng([rank, turn]).standard_normal(n_elems)

    ranks = group.view.ranks
    data = values(ranks[group.rank])
    group.all_reduce(data)
    np.testing.assert_allclose(data, sum(map(values, ranks)), atol=1e-12)


def digest(*arrays: Array) -> str:
    return hashlib.blake2b(b"".join(each.tobytes() for each in arrays), digest_size=8).hexdigest()


def private(n_elems: int, dtype: Any = np.float32) -> Array:
    return np.empty(n_elems, dtype)


def unaligned(n_elems: int, dtype: Any = np.float32) -> Array:
    return np.empty(n_elems + 1, dtype)[1:]


def shared(n_elems: int, dtype: Any = np.float32) -> Array:
    array: Array = shoal.empty(n_elems, np.dtype(dtype))
    return array


def inside_shared(n_elems: int, dtype: Any = np.float32) -> Array:
    array: Array = shoal.empty(n_elems + 20, np.dtype(dtype))[3 : n_elems + 3]
    return array


def filled(memory: Memory, values: Array) -> Array:
    array = memory(values.size, values.dtype)
    array[...] = values
    return array
