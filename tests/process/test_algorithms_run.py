"""Every algorithm, carried by the engine between real processes, against what NumPy computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import pretend_hosts

import shoal
from shoal.plan.choose import Choice
from shoal.schedule import ALGORITHMS, COLLECTIVES, Buffer, Root, contract_of

if TYPE_CHECKING:
    from shoal.plan import Planner

Array = np.ndarray[Any, np.dtype[Any]]
Memory = Callable[[Array], Array]

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

    def n_lanes(self, collective: str, n_bytes: int) -> int:
        return 1


@functools.cache
def own(rank: int, n_chunks: int, n_elems: int) -> Array:
    """Exact in any order of addition, and no piece of it looks like another."""
    numbers = np.random.default_rng([rank, n_elems]).integers(-99, 99, (n_chunks, n_elems))
    values = numbers.astype("float32")
    values.flags.writeable = False
    return values


def check(group: shoal.Group, collective: str, n: int, memory: Memory, doing: str) -> None:
    """One call for every root, averages where it folds, leaves what NumPy makes of the contract."""
    row, n_chunks = COLLECTIVES[collective], 1 if COLLECTIVES[collective].in_place else group.size
    brought = [own(rank, n_chunks, n) for rank in range(group.size)]
    for root in range(group.size) if row.root is not Root.NONE else (0,):
        contract = contract_of(collective, group.rank, group.size, n_chunks, root)
        counts = contract.n_chunks
        how = ({"root": root} if row.root is not Root.NONE else {}) | (
            {"op": "avg"} if row.folds else {}
        )
        if not row.carries:
            getattr(group, collective)(**how)
            continue
        n_read = counts[Buffer.DATA if row.in_place else Buffer.INPUT]
        data = memory(brought[group.rank][:n_read].ravel()) if n_read else None
        n_written = counts.get(Buffer.OUTPUT, 0)
        output = memory(np.zeros(n_written * n, "float32")) if n_written else None
        getattr(group, collective)(*((data,) if row.in_place else (output, data)), **how)
        result = data if row.in_place else output
        for (_, chunk), value in contract.postcondition.items():
            want = functools.reduce(np.add, [brought[rank][value.chunk] for rank in value.ranks])
            want = want / group.size if value.finished else want
            assert result is not None
            found = result[chunk * n :][:n]
            np.testing.assert_allclose(found, want, rtol=1e-6, err_msg=f"{doing}, root {root}")


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
                check(group, collective, n_elems, memory, doing)
                n_checked += 1
        group.plan_by(planner)
    return n_checked


@pytest.mark.parametrize(("size", "ranks_per_host"), [(3, 3), (4, 2), (5, 2), (5, 1)])
def test_every_algorithm_carries_what_numpy_computes(size: int, ranks_per_host: int) -> None:
    n_checked = len(NAMES) * len(LENGTHS)
    assert run_ranks(run_everything, size, ranks_per_host) == size * [n_checked]
