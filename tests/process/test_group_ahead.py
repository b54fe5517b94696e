"""Ranks may call far ahead of the others."""

import numpy as np
from process.ranks import on_ranks

import shoal
from shoal.group.work import Work

N_CALLS = 14_000  # more than are announced to a rank that has answered no call


def wait_for_all(works: list[Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


@on_ranks(2)
def test_all_receives_may_be_posted_before_the_first_send() -> None:
    with shoal.init() as group:
        other = 1 - group.rank
        got, sent = np.zeros((N_CALLS, 4), np.float32), np.ones((N_CALLS, 4), np.float32)
        works = [group.recv(each, other, tag=at % 8, async_op=True) for at, each in enumerate(got)]
        works += [
            group.send(each, other, tag=at % 8, async_op=True) for at, each in enumerate(sent)
        ]
        wait_for_all(works)
        assert (got == sent).all()


@on_ranks(2)
def test_many_named_calls_may_be_made_in_opposite_orders() -> None:
    with shoal.init() as group:
        data = np.repeat(np.arange(N_CALLS, dtype=np.float32)[:, None], 4, axis=1)
        order = range(N_CALLS) if group.rank == 0 else range(N_CALLS - 1, -1, -1)
        wait_for_all([group.all_reduce(data[at], name=str(at), async_op=True) for at in order])
        assert (data == 2 * np.arange(N_CALLS)[:, None]).all()


@on_ranks(2)
def test_calls_of_one_group_do_not_delay_another_group() -> None:
    with shoal.init() as group, group.subgroup([0, 1], "other") as other:
        data = np.full((N_CALLS, 4), group.rank, np.float32)
        if group.rank == 0:
            works = [group.recv(each, 1, async_op=True) for each in data]
            other.barrier()
        else:
            other.barrier()
            works = [group.send(each, 0, async_op=True) for each in data]
        wait_for_all(works)
        group.barrier()
        assert (data == 1).all()
