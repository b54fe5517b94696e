"""One call of several in the same `shoal.empty` memory fails: the others go on."""

import numpy as np
from process.ranks import run_ranks

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
