"""One call of several over the same memory fails: the others go on."""

from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import Closed

N_ELEMS = 1 << 20
# Rounds in which the background thread comes to tell peers what memory is gone, every 0.1 s.
N_ROUNDS = 3000


def fail_one_of_two(reads: bool) -> list[bool]:
    """Rank 0 takes part in two calls in one region, of which one is aborted."""
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
            for _ in range(N_ROUNDS):
                group.barrier()
            sending.wait()
            # In the rest of the region, also over the border of what was taken away.
            going.send(third, 1)
            going.recv(third, 1)
            going.recv(memory[N_ELEMS // 2 :][:N_ELEMS], 1)
            same = memory[N_ELEMS // 2 :][:N_ELEMS] == want
            return [bool((third == want).all()), bool(same.all()), bool((first[:10] == -1).all())]
        for _ in range(N_ROUNDS + 1):
            group.barrier()
        results = []
        for _ in range(2):
            going.recv(own, 0)
            results.append(bool((own == want).all()))
        going.send(want, 0)
        going.send(want, 0)
        return results


def test_a_receive_that_fails_leaves_the_other_calls_of_its_memory_alone() -> None:
    assert run_ranks(fail_one_of_two, 2, False) == [[True] * 3, [True] * 2]


def test_a_send_that_fails_leaves_the_other_calls_of_its_memory_alone() -> None:
    assert run_ranks(fail_one_of_two, 2, True) == [[True] * 3, [True] * 2]


def end_one_of_two_groups(n_elems: int, n_calls: int, on_hosts: bool, by_message: bool) -> bool:
    """Rank 0 moves one array in two groups at once, and the first of them ends."""
    if on_hosts:
        pretend_hosts(1)
    with shoal.init(timeout_s=10) as group:
        failing = group.subgroup([0, 1, 2], "failing")
        if group.rank == 2:
            group.barrier()
            return error_of(failing.barrier) is not None
        going = group.subgroup([0, 1], "going")
        want = np.arange(n_elems, dtype=np.float32)
        data = [want] * n_calls if group.rank == 0 else np.zeros((n_calls, n_elems), np.float32)

        def call(of: shoal.Group, array: np.ndarray) -> Any:
            if not by_message:
                return of.broadcast(array, 0, async_op=True)
            return of.send(array, 1, work=True) if of.rank == 0 else of.recv(array, 0, work=True)

        # Rank 1 takes nothing before all of it waits, and the half of it has been taken back.
        if group.rank == 1:
            group.barrier()
            works = [call(going, array) for array in data]
        else:
            lost, works = zip(
                *[(call(failing, one), call(going, one)) for one in data], strict=True
            )
            failing.abort("this one only")
            for work in lost:
                error_of(work.wait)
            group.barrier()
        for work in works:
            work.wait()
        return all((array == want).all() for array in data)


@pytest.mark.parametrize("by_message", [False, True])
@pytest.mark.parametrize("on_hosts", [False, True])
@pytest.mark.parametrize(("n_elems", "n_calls"), [(3000, 40), (16_000, 8), (1 << 20, 4)])
def test_a_group_that_ends_takes_nothing_from_the_calls_of_another_over_the_same_array(
    n_elems: int, n_calls: int, on_hosts: bool, by_message: bool
) -> None:
    ended = run_ranks(end_one_of_two_groups, 3, n_elems, n_calls, on_hosts, by_message)
    assert ended == [True] * 3
