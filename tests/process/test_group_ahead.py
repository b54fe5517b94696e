"""Ranks may call far ahead of the others."""

import numpy as np
from process.ranks import FileRanks

import shoal
from shoal.group.work import Work

N_CALLS = 14_000  # more than are announced to a rank that has answered no call


def wait_for_all(works: list[Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def receive_before_sending() -> bool:
    with shoal.init() as group:
        other = 1 - group.rank
        got, sent = np.zeros((N_CALLS, 4), np.float32), np.ones((N_CALLS, 4), np.float32)
        works = [group.recv(each, other, tag=at % 8, async_op=True) for at, each in enumerate(got)]
        works += [
            group.send(each, other, tag=at % 8, async_op=True) for at, each in enumerate(sent)
        ]
        wait_for_all(works)
        return bool((got == sent).all())


def call_by_name_in_opposite_orders() -> bool:
    with shoal.init() as group:
        data = np.repeat(np.arange(N_CALLS, dtype=np.float32)[:, None], 4, axis=1)
        order = range(N_CALLS) if group.rank == 0 else range(N_CALLS - 1, -1, -1)
        wait_for_all([group.all_reduce(data[at], name=str(at), async_op=True) for at in order])
        return bool((data == 2 * np.arange(N_CALLS)[:, None]).all())


def receive_data_sent_after_a_call_of_another_group() -> bool:
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
        return bool((data == 1).all())


def test_all_receives_may_be_posted_before_the_first_send(forked: FileRanks) -> None:
    assert forked.run(receive_before_sending, 2) == [True, True]


def test_many_named_calls_may_be_made_in_opposite_orders(forked: FileRanks) -> None:
    assert forked.run(call_by_name_in_opposite_orders, 2) == [True, True]


def test_calls_of_one_group_do_not_delay_another_group(forked: FileRanks) -> None:
    assert forked.run(receive_data_sent_after_a_call_of_another_group, 2) == [True, True]
