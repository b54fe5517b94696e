"""Every collective on NumPy arrays in real processes, against what NumPy itself computes."""

import functools
import hashlib
import os

import numpy as np
import pytest
from process.arrays import (
    DTYPES,
    Memory,
    check,
    contribution,
    exists,
    filled,
    folded,
    inside_shared,
    numpy_type,
    private,
    shared,
    unaligned,
)
from process.ranks import run_ranks
from process.stage import pretend_hosts

import shoal
from shoal.dtypes import Op

# A segment holds 32768 float32 and a rank lends a peer six at a time: the last length fills the
# slots of the largest group here several times over.
LENGTHS = (1, 2, 1009, 40_001, 1_000_003)


class Checks:
    """One rank's side of all collectives, on arrays of one length in one kind of memory."""

    def __init__(self, group: shoal.Group, n_elems: int, memory: Memory) -> None:
        self.group, self.n_elems, self.memory = group, n_elems, memory
        self.blocks = [contribution(rank, n_elems) for rank in range(group.size)]
        self.own = self.blocks[group.rank]

    def all(self) -> None:
        self.all_reduce()
        for root in {0, self.group.size - 1}:
            self.broadcast(root)
        self.all_gather()
        self.reduce_scatter()

    def all_reduce(self) -> None:
        data = filled(self.memory, self.own)
        assert self.group.all_reduce(data) is None
        check(data, folded(self.blocks, Op.SUM))

    def broadcast(self, root: int) -> None:
        data = filled(self.memory, self.own)
        self.group.broadcast(data, root)
        check(data, self.blocks[root])

    def all_gather(self) -> None:
        whole = self.memory(self.group.size * self.n_elems, np.float32)
        data = filled(self.memory, self.own)
        self.group.all_gather(whole, data)
        check(whole, np.concatenate(self.blocks))

        parts = [self.memory(self.n_elems, np.float32) for _ in self.blocks]
        self.group.all_gather(parts, data)
        check(parts, self.blocks)

        whole[:] = -7
        mine = whole[self.group.rank * self.n_elems :][: self.n_elems]
        mine[:] = self.own
        self.group.all_gather(whole, mine)
        check(whole, np.concatenate(self.blocks))
        check(data, self.own)

    def reduce_scatter(self) -> None:
        rank, size = self.group.rank, self.group.size
        every = [contribution(other, size * self.n_elems) for other in range(size)]
        want = folded([each.reshape(size, -1)[rank] for each in every], Op.SUM)
        whole, output = filled(self.memory, every[rank]), self.memory(self.n_elems, np.float32)
        self.group.reduce_scatter(output, whole)
        check(output, want)
        check(whole, every[rank])

        parts = [filled(self.memory, part) for part in every[rank].reshape(size, -1)]
        output[:] = -7
        self.group.reduce_scatter(output, parts)
        check(output, want)
        check(parts, every[rank].reshape(size, -1))

        self.group.reduce_scatter(parts[rank], parts)
        check(parts[rank], want)


def check_everything(lengths: tuple[int, ...], ranks_per_host: int = 8) -> int:
    """All collectives in every kind of memory. What was checked comes back, as a count."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        # Ranks may differ in where their arrays lie.
        mixed = shared if group.rank % 2 else private
        for n_elems in sorted({0, group.size - 1, *lengths}):
            few = () if n_elems > 500_000 else (unaligned, inside_shared)
            for memory in (private, shared, mixed, *few):
                Checks(group, n_elems, memory).all()
            group.barrier()
        return group.size


def check_folds(n_elems: int, ranks_per_host: int = 8) -> int:
    """Every operation on every type."""
    pretend_hosts(ranks_per_host)
    n_checked = 0
    with shoal.init() as group:
        for dtype in DTYPES:
            blocks = [contribution(rank, n_elems, numpy_type(dtype)) for rank in range(group.size)]
            for op in filter(functools.partial(exists, dtype), Op):
                memory = shared if n_checked % 2 else private
                data = filled(memory, blocks[group.rank])
                group.all_reduce(data, op if n_checked % 3 else str(op))
                check(data, folded(blocks, op), f"{op} of {dtype}")
                n_checked += 1
    return n_checked


def digests(seed: int, ranks_per_host: int = 8) -> list[str]:
    """The bits of sums and averages of random numbers, whose order of addition matters."""
    pretend_hosts(ranks_per_host)
    found = []
    with shoal.init() as group:
        noise = np.random.default_rng([seed, group.rank])
        for n_elems in (5, 3001, 100_003):
            for dtype in ("float32", "float16", "complex64"):
                values = noise.standard_normal(n_elems).astype(dtype)
                for op, memory in (("sum", private), ("avg", shared)):
                    data = filled(memory, values)
                    group.all_reduce(data, op)
                    found.append(hashlib.sha256(data.tobytes()).hexdigest())
    return found


def digests_in_rank_order(seed: int) -> list[str]:
    """The direct exchange folds in the order of the ranks; NumPy, asked to, gives the same bits."""
    found = []
    with shoal.init() as group:
        for n_elems in (5, 3001, 100_003):
            blocks = [
                np.random.default_rng([seed, rank]).standard_normal(n_elems).astype("float32")
                for rank in range(group.size)
            ]
            data = blocks[group.rank].copy()
            group.all_reduce(data)
            check(data, functools.reduce(np.add, blocks))
            found.append(hashlib.sha256(data.tobytes()).hexdigest())
    return found


IS_SOAK = bool(os.environ.get("SHOAL_SOAK"))


@pytest.mark.parametrize("size", [1, 2, 3, 4] if IS_SOAK else [1, 3, 4])
def test_all_collectives_agree_with_numpy(size: int) -> None:
    assert run_ranks(check_everything, size, LENGTHS) == size * [size]


@pytest.mark.parametrize("size", [5, 8] if IS_SOAK else [8])
def test_all_collectives_agree_with_numpy_on_more_ranks_than_cores(size: int) -> None:
    assert run_ranks(check_everything, size, (1, 70_001)) == size * [size]


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3])
def test_shared_memory_and_tcp_mix_in_one_group(ranks_per_host: int) -> None:
    assert run_ranks(check_everything, 4, (1, 1009, 100_003), ranks_per_host) == [4, 4, 4, 4]


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@pytest.mark.parametrize("n_elems", [257, 40_007])
def test_every_operation_on_every_type_agrees_with_numpy(n_elems: int, ranks_per_host: int) -> None:
    n_pairs = sum(exists(dtype, op) for dtype in DTYPES for op in Op)
    assert run_ranks(check_folds, 3, n_elems, ranks_per_host) == [n_pairs] * 3


@pytest.mark.parametrize("ranks_per_host", [4, 2])
def test_floating_sums_have_the_same_bits_on_all_ranks_and_in_every_run(
    ranks_per_host: int,
) -> None:
    first, again = (run_ranks(digests, 4, 7, ranks_per_host) for _ in range(2))
    assert first == again == [first[0]] * 4


def test_the_direct_exchange_folds_in_rank_order() -> None:
    results = run_ranks(digests_in_rank_order, 4, 3, env={"SHOAL_ALGO": "direct"})
    assert results == [results[0]] * 4


IPV6 = os.path.exists("/proc/net/if_inet6")


@pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")
def test_ranks_on_an_ipv6_master_agree_with_numpy() -> None:
    env = {"MASTER_ADDR": "::1"}
    assert run_ranks(check_everything, 2, (1, 1009, 100_003), 1, env=env) == [2, 2]
