"""When one of several calls over the same memory fails, the others go on."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import Closed

N_ELEMS = 1 << 20
# Every 0.1 s the background thread reports revoked memory to peers.
ROUNDS_S = 0.3


def go_round(group: shoal.Group) -> None:
    """Call until rank 0 sees that the time is up."""
    until, go_on = time.monotonic() + ROUNDS_S, np.ones(1)
    while go_on[0]:
        go_on[0] = group.rank != 0 or time.monotonic() < until
        group.all_reduce(go_on, "min")


@pytest.mark.parametrize("reads", [False, True])
@on_ranks(2)
def test_a_failed_message_does_not_affect_other_calls_over_its_memory(reads: bool) -> None:
    """Rank 0 makes two calls in one region, and one of them is aborted."""
    with shoal.init() as group:
        failing, going = group.subgroup([0, 1], "failing"), group.subgroup([0, 1], "going")
        memory = shoal.empty(3 * N_ELEMS)
        first, second, third = np.split(memory, 3)
        own = np.empty(N_ELEMS, np.float32)
        want = np.arange(N_ELEMS, dtype=np.float32)
        second[:] = third[:] = want
        if group.rank == 0:
            sending = going.send(second, 1, work=True)
            lost = (failing.send if reads else failing.recv)(first, 1, work=True)
            group.barrier()
            failing.abort("this one only")
            try:
                lost.wait()
            except Closed:
                first[:] = -1
            go_round(group)
            sending.wait()
            # In the rest of the region, also across the border of the revoked part.
            going.send(third, 1)
            going.recv(third, 1)
            going.recv(memory[N_ELEMS // 2 :][:N_ELEMS], 1)
            same = memory[N_ELEMS // 2 :][:N_ELEMS] == want
            assert (third == want).all()
            assert same.all()
            assert (first[:10] == -1).all()
            return
        group.barrier()
        go_round(group)
        for _ in range(2):
            going.recv(own, 0)
            assert (own == want).all()
        going.send(want, 0)
        going.send(want, 0)


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_an_ended_group_does_not_affect_another_groups_calls_over_the_same_array(
    ranks_per_host: int,
) -> None:
    """Rank 0 moves one array in two groups at once, and the first of them ends."""
    pretend_hosts(ranks_per_host)
    cases = itertools.product([(3000, 40), (16_000, 8), (1 << 20, 4)], [False, True])
    with shoal.init(timeout_s=10) as group:
        for number, (size, by_message) in enumerate(cases):
            end_one(group, str(number), *size, by_message)


def end_one(group: shoal.Group, name: str, n_elems: int, n_calls: int, by_message: bool) -> None:
    failing = group.subgroup([0, 1, 2], f"failing {name}")
    if group.rank == 2:
        group.barrier()
        assert error_of(failing.barrier) is not None
        return
    going = group.subgroup([0, 1], f"going {name}")
    want = np.arange(n_elems, dtype=np.float32)
    data = [want] * n_calls if group.rank == 0 else np.zeros((n_calls, n_elems), np.float32)

    def call(of: shoal.Group, array: np.ndarray) -> Any:
        if not by_message:
            return of.broadcast(array, 0, async_op=True)
        return of.send(array, 1, work=True) if of.rank == 0 else of.recv(array, 0, work=True)

    # Rank 1 receives only once all data waits and half of it has been revoked.
    if group.rank == 1:
        group.barrier()
        works = [call(going, array) for array in data]
    else:
        lost, works = zip(*[(call(failing, one), call(going, one)) for one in data], strict=True)
        failing.abort("this one only")
        for work in lost:
            error_of(work.wait)
        group.barrier()
    for work in works:
        work.wait()
    assert all((array == want).all() for array in data)
