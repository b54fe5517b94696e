"""Every algorithm, carried by the engine between real processes, against what NumPy computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import pretend_hosts

import shoal
from shoal.plan import Choice, Planner
from shoal.schedule import ALGORITHMS

Array = np.ndarray[Any, np.dtype[Any]]

# Less than one for each rank, less than a segment for each, and several for each.
LENGTHS = (2, 1009, 300_007)
COMPOUND = ("sharded(2)", "sharded/ring", "ring/tree", "halving/doubling", "tree/direct")


class Forced:
    """A planner that always says the same."""

    def __init__(self, planner: Planner, name: str) -> None:
        self._name = name
        self.cluster = planner.cluster

    def choose(self, collective: str, n_bytes: int, *_: object) -> Choice:
        return Choice(self._name, 0.0, "forced")

    def n_stripes(self, collective: str, n_bytes: int) -> int:
        return 1


def own(rank: int, n_elems: int) -> Array:
    """Exact in any order of addition, and no piece of it looks like another."""
    return np.random.default_rng([rank, n_elems]).integers(-99, 99, n_elems).astype("float32")


def check(got: Array, want: Array, doing: str) -> None:
    np.testing.assert_array_equal(got, want, err_msg=doing)


def all_reduce(group: shoal.Group, n: int, memory: Callable[..., Array], doing: str) -> None:
    data = memory(own(group.rank, n))
    group.all_reduce(data, "avg")
    total = functools.reduce(np.add, [own(r, n) for r in range(group.size)])
    np.testing.assert_allclose(data, total / group.size, rtol=1e-6, err_msg=doing)


def rooted(group: shoal.Group, n: int, memory: Callable[..., Array], doing: str) -> None:
    """Broadcast or reduce, from every root."""
    total = functools.reduce(np.add, [own(r, n) for r in range(group.size)])
    for root in range(group.size):
        data = memory(own(group.rank, n))
        if doing.startswith("broadcast"):
            group.broadcast(data, root)
            check(data, own(root, n), doing)
        else:
            group.reduce(data, root)
            check(data, total if group.rank == root else own(group.rank, n), doing)


def blocks(group: shoal.Group, n: int, memory: Callable[..., Array], doing: str) -> None:
    """All-gather, reduce-scatter and all-to-all."""
    rank, size = group.rank, group.size
    whole = [own(r, n * size).reshape(size, n) for r in range(size)]
    if doing.startswith("all_gather"):
        outputs = memory(np.zeros(n * size, "float32"))
        group.all_gather(outputs, memory(whole[rank][0]))
        check(outputs, np.concatenate([whole[r][0] for r in range(size)]), doing)
    elif doing.startswith("reduce_scatter"):
        output = memory(np.zeros(n, "float32"))
        group.reduce_scatter(output, memory(whole[rank].ravel()))
        check(output, functools.reduce(np.add, [whole[r][rank] for r in range(size)]), doing)
    else:
        outputs = memory(np.zeros(n * size, "float32"))
        group.all_to_all(outputs, memory(whole[rank].ravel()))
        check(outputs, np.concatenate([whole[r][rank] for r in range(size)]), doing)


def rooted_blocks(group: shoal.Group, n: int, memory: Callable[..., Array], doing: str) -> None:
    """Gather or scatter, from every root."""
    rank, size = group.rank, group.size
    for root in range(size):
        if doing.startswith("gather"):
            outputs = memory(np.zeros(n * size, "float32")) if rank == root else None
            group.gather(outputs, memory(own(rank, n)), root)
            if outputs is not None:
                check(outputs, np.concatenate([own(r, n) for r in range(size)]), doing)
        else:
            inputs = memory(own(root, n * size)) if rank == root else None
            output = memory(np.zeros(n, "float32"))
            group.scatter(output, inputs, root)
            check(output, own(root, n * size)[rank * n :][:n], doing)


def barrier(group: shoal.Group, n: int, memory: Callable[..., Array], doing: str) -> None:
    group.barrier()


CHECKS = {
    "all_reduce": all_reduce,
    "broadcast": rooted,
    "reduce": rooted,
    "all_gather": blocks,
    "reduce_scatter": blocks,
    "all_to_all": blocks,
    "gather": rooted_blocks,
    "scatter": rooted_blocks,
    "barrier": barrier,
}


NAMES = [
    *((c, name) for c, known in ALGORITHMS.items() for name in known),
    *(("all_reduce", name) for name in COMPOUND),
]


def private(values: Array) -> Array:
    return values.copy()


def shared(values: Array) -> Array:
    data = shoal.empty(values.shape, values.dtype)
    data[:] = values
    return data


def run_everything(ranks_per_host: int) -> int:
    pretend_hosts(ranks_per_host)
    n_checked = 0
    with shoal.init() as group:
        planner = group.planner
        for collective, name in NAMES:
            group.plan_by(Forced(planner, name))
            for n_elems in LENGTHS:
                memory = shared if n_checked % 2 else private
                doing = f"{collective} by {name}, {n_elems} elements, {memory.__name__} memory"
                CHECKS[collective](group, n_elems, memory, doing)
                n_checked += 1
        group.plan_by(planner)
    return n_checked


def test_every_collective_has_a_check() -> None:
    assert set(CHECKS) == set(ALGORITHMS)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(3, 3), (4, 2), (5, 2), (5, 1)])
def test_every_algorithm_carries_what_numpy_computes(size: int, ranks_per_host: int) -> None:
    n_checked = len(NAMES) * len(LENGTHS)
    assert run_ranks(run_everything, size, ranks_per_host) == size * [n_checked]
