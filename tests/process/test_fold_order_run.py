"""Any set of reducers yields the bits that docs/bits.md defines, as computed by NumPy."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from contract.fold_orders import FLOOR_BYTES, folded, own
from process.arrays import filled, private, shared
from process.ranks import FileRanks
from process.stage import pretend_hosts

import shoal
from shoal.plan import Planner
from shoal.plan.settings import Forced

Array = np.ndarray[Any, np.dtype[Any]]


def by_any_set(size: int) -> list[str]:
    """Sharded algorithms over every non-empty set of workers."""
    sets = itertools.product((0, 1), repeat=size)
    return [f"sharded[{','.join(map(str, chosen))}|]" for chosen in sets if any(chosen)]


@functools.cache
def given_and_wanted(
    size: int, n_elems: int, dtype: str, fold: np.ufunc
) -> tuple[list[Array], bytes]:
    values = [own(rank, n_elems, dtype) for rank in range(size)]
    return values, folded(values, fold).tobytes()


def check(group: shoal.Group, name: str, n_elems: int, dtype: str, fold: np.ufunc) -> None:
    values, want = given_and_wanted(group.size, n_elems, dtype, fold)
    if name == "direct":  # in the order of the ranks
        want = functools.reduce(fold, values).tobytes()
    for memory in (private, shared):
        data = filled(memory, values[group.rank])
        group.all_reduce(data, {np.add: "sum", np.multiply: "product"}[fold])
        assert data.tobytes() == want, f"{name}, {n_elems} {dtype}"


def reduce_by_everyone(ranks_per_host: int) -> int:
    """Use one stripe, three, one per worker, and several segments per worker."""
    pretend_hosts(ranks_per_host)
    n_checked = 0
    with shoal.init() as group:
        size = group.size
        names = [*by_any_set(size), "sharded", "direct"]
        planner = group.planner
        for name in names:
            group.plan_by(Planner(planner.cluster, Forced(name, name)))
            assert group.planner.choose("all_reduce", 4096).name == name
            for n_elems in (1009, 3 * FLOOR_BYTES // 4 + 7, size * FLOOR_BYTES // 4 + 13):
                check(group, name, n_elems, "float32", np.add)
                n_checked += 1
        for name in (names[1], "sharded"):
            group.plan_by(Planner(planner.cluster, Forced(name, name)))
            assert group.planner.choose("all_reduce", 4096).name == name
            check(group, name, 300_007, "float32", np.add)
            check(group, name, size * FLOOR_BYTES // 2 + 5, "float16", np.add)
            check(group, name, size * FLOOR_BYTES // 8 + 5, "float64", np.multiply)
        group.plan_by(planner)
    return n_checked


@pytest.mark.parametrize(("size", "ranks_per_host"), [(4, 4), (3, 1)])
def test_every_set_of_reducers_yields_the_same_bits(
    size: int, ranks_per_host: int, forked: FileRanks
) -> None:
    n_checked = 3 * (2**size + 1)
    assert forked.run(reduce_by_everyone, size, ranks_per_host) == [n_checked] * size
