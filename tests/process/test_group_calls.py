"""Calls on a group: in flight, in subgroups, at its end, and between two ranks.

unit/test_work.py covers callbacks, test_state.py deadlines, test_torch_threads.py dropped groups,
and the native tests of messages how receives from any rank match and end.
"""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from process.arrays import ones
from process.ranks import on_ranks
from process.serving import wait_for_all
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError

LONG_S = 60.0


@on_ranks(2)
def test_a_dropped_buffer_lives_exactly_until_its_call_is_done() -> None:
    with shoal.init() as group:
        alone = group.subgroup([group.rank], "alone")
        forgotten = []
        for length in (10, 3_000_000):
            for data in (ones(length), shoal.empty(length)):
                forgotten.append(weakref.ref(data))
                group.all_reduce(data, async_op=True)
            del data
        gc.collect()
        while any(data() is not None for data in forgotten):
            alone.barrier(async_op=True)  # later calls release the buffers of finished ones
        last = ones(10)
        group.all_reduce(last)
        assert last[0] == 2


@on_ranks(1)
def test_a_group_may_be_closed_while_other_threads_make_calls() -> None:
    with shoal.init() as group:
        ended: list[str] = []

        def call(alone: shoal.Group) -> None:
            data = ones(1)
            try:
                while True:
                    alone.all_reduce(data)
            except Exception as error:  # noqa: BLE001 - the test checks it
                ended.append(type(error).__name__)

        for number in range(20):
            alone = group.subgroup([group.rank], f"alone {number}")
            threads = [threading.Thread(target=call, args=[alone]) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.001)
            alone.close()
            for thread in threads:
                thread.join(LONG_S)
        assert set(ended) == {"Closed"}


@on_ranks(2)
def test_a_long_call_does_not_hold_the_buffers_of_later_calls() -> None:
    with shoal.init() as group:
        waiting = None if group.rank else group.recv(ones(1), tag=7, async_op=True)
        forgotten = []
        for _ in range(20):
            data = ones(10)
            forgotten.append(weakref.ref(data))
            work = group.all_reduce(data, async_op=True)
            work.wait()
            del data, work
        gc.collect()
        n_kept = sum(data() is not None for data in forgotten)
        if waiting is None:
            group.send(ones(1), 0, tag=7)
        else:
            waiting.wait()
        assert n_kept <= 2


@on_ranks(2)
def test_calls_with_one_name_match_in_order_while_all_are_in_flight() -> None:
    with shoal.init() as group:
        data = [ones(length, place + 1) for place, length in enumerate((2_000_000, 1, 40_000))]
        works = [group.all_reduce(each, name="alike", async_op=True) for each in data]
        wait_for_all(reversed(works))
        assert [each[-1] for each in data] == [2, 4, 6]


@on_ranks(4)
def test_subgroups_reduce_side_by_side_and_a_closed_one_can_be_remade() -> None:
    with shoal.init() as world:
        rank = world.rank
        # Rank 3 of the world is rank 0 of "odd".
        parts = {"even": [0, 2], "odd": [3, 1], "three": [1, 2, 3], "alone": [rank]}
        mine = {name: world.subgroup(ranks, name) for name, ranks in parts.items() if rank in ranks}
        for name, group in mine.items():
            assert group.rank == parts[name].index(rank)
            assert group.size == len(parts[name])
        data = {name: ones(70_001, 10.0**rank) for name in mine}
        works = [group.all_reduce(data[name], async_op=True) for name, group in mine.items()]
        wait_for_all(works)
        for name, group in mine.items():
            assert data[name][0] == sum(10.0**member for member in parts[name])
            buffer = ones(5, rank)
            group.broadcast(buffer, root=group.size - 1)
            assert buffer[0] == parts[name][-1]
        if rank in (1, 2):
            inner = mine["three"].subgroup([0, 1], "inner")
            buffer = ones(4, 10.0**rank)
            inner.all_reduce(buffer)
            assert buffer[0] == 110
            inner.close()
            assert isinstance(error_of(inner.all_reduce, ones(1)), Closed)
        again = world.subgroup([3, 2, 1, 0], "again")
        again.barrier()
        again.close()
        world.barrier()
        again = world.subgroup([3, 2, 1, 0], "again")
        again.barrier()
        for ranks in ([0, 0, rank], [rank, 4], [(rank + 1) % 4], [-1, rank]):
            assert isinstance(error_of(world.subgroup, ranks, "wrong"), UsageError)
    assert isinstance(error_of(again.barrier), Closed)


@on_ranks(3)
def test_two_worlds_in_one_process_do_not_affect_each_other() -> None:
    with shoal.init() as first, shoal.init() as second:
        for group in (first, second, first):
            data = ones(100_003, group.rank)
            group.all_reduce(data)
            assert data[-1] == 3
        second.close()
        second.close()
        data = ones(3)
        first.all_reduce(data)
        assert data[0] == 3


@on_ranks(2)
def test_a_wait_that_times_out_does_not_end_the_call() -> None:
    with shoal.init() as group:
        data = ones(10)
        if group.rank == 0:
            work = group.all_reduce(data, async_op=True)
            error = error_of(work.wait, 0.01)
            assert isinstance(error, TimedOut)
            assert "goes on" in str(error)
            group.send(b"!", 1, tag=1)
            work.wait()
        else:
            group.recv(bytearray(1), 0, tag=1)
            group.all_reduce(data)
        assert data[0] == 2


@on_ranks(3)
def test_an_abort_ends_only_its_group_on_every_rank_with_its_reason() -> None:
    with shoal.init() as world:
        group = world.subgroup([0, 1, 2], "part")
        if world.rank == 0:
            group.abort("enough")
        of_subgroup = error_of(group.barrier)
        assert isinstance(of_subgroup, Closed)
        assert "enough" in str(of_subgroup)
        data = ones(7)
        world.all_reduce(data)
        assert data[0] == 3
        if world.rank == 1:
            for other in (0, 2):  # both ranks have their sums
                world.recv(bytearray(1), other)
            world.abort("the loss is not a number")
        else:
            world.send(b"!", 1)
        for error in (error_of(world.all_reduce, ones(1000)), error_of(world.barrier)):
            assert isinstance(error, Closed), error
            assert "rank 1" in str(error)
            assert "the loss is not a number" in str(error)


@on_ranks(2)
def test_calls_on_a_closed_group_are_errors() -> None:
    group = shoal.init()
    part = group.subgroup([0, 1], "part")
    group.barrier()
    pending = group.recv(bytearray(1), 1 - group.rank, 4, work=True)
    group.close()
    # The second rank to close may receive the other's goodbye first.
    assert isinstance(error_of(pending.wait), (Closed, PeerLost))
    calls = (group.all_reduce, ones(1)), (part.barrier,), (group.subgroup, [0, 1], "new")
    for call, *given in calls:
        assert isinstance(error_of(call, *given), Closed)
    group.abort("too late")
    part.close()


N_CALLS = 14_000  # more than are announced to a rank that has answered no call


@on_ranks(2)
def test_all_receives_may_be_posted_before_the_first_send() -> None:
    with shoal.init() as group:
        other = 1 - group.rank
        got, sent = np.zeros((N_CALLS, 4), np.float32), np.ones((N_CALLS, 4), np.float32)
        works = [group.recv(each, other, tag=at % 8, async_op=True) for at, each in enumerate(got)]
        works += [group.send(one, other, tag=at % 8, async_op=True) for at, one in enumerate(sent)]
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


@on_ranks(3, has_stage=True)
def test_a_rank_that_closes_first_still_takes_part_in_unwaited_calls() -> None:
    stage, group = Stage.from_environment(), shoal.init()
    data = bytearray(b"order 01" if group.rank == 0 else bytes(8))
    if group.rank == 0:
        stage.await_all(2, "closes")
    work = group.broadcast(data, 0, async_op=True)
    work.finish_at_close()
    if group.rank > 0:
        stage.cue(f"rank {group.rank - 1}: closes")
    group.close()
    work.wait()
    assert data == b"order 01"


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (3, 3), (3, 1)])
@on_ranks()
def test_messages_arrive_by_source_and_tag(size: int, ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        pass_round_the_ring(group)
        receive_by_tag(group)
        group.barrier()


def pass_round_the_ring(group: shoal.Group) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for length in (0, 1, 1009, 40_001, 2_000_003):
        into = ones(length, -1.0)
        sending = group.send(ones(length, group.rank), right, work=True)
        group.recv(into, left)
        sending.wait()
        assert (into == left).all(), length


def receive_by_tag(group: shoal.Group) -> None:
    """Receive in another order than the messages are sent."""
    if group.rank == 0:
        for number, tag in enumerate((5, 7, 5)):
            group.send(ones(3, number), 1, tag)
        group.send(b"read-only", 1, 9)
    if group.rank == 1:
        for tag, number in ((7, 1), (5, 0), (5, 2)):
            into = ones(3, -1.0)
            group.recv(into, 0, tag)
            assert (into == number).all(), tag
        text = bytearray(9)
        group.recv(text, 0, 9)
        assert text == b"read-only"


@pytest.mark.parametrize("ranks_per_host", [2, 1])
@on_ranks(2)
def test_a_receive_from_any_source_goes_on_in_the_background(ranks_per_host: int) -> None:
    """Send a large message to a rank that waits in a collective and drives no receive."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        data = ones(1_000_000, group.rank)
        if group.rank == 0:
            pending = group.recv(data, async_op=True)
        else:
            group.send(data, 0)  # returns once it is received
        group.barrier()
        if group.rank == 0:
            pending.wait()
        assert data[-1] == 1
