"""Calls on a group: in flight, in subgroups, and at its end.

unit/test_work.py covers callbacks, test_state.py deadlines, test_group_ahead.py any order of calls.
"""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
from process.ranks import FileRanks, on_ranks
from process.stage import error_of

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError

LONG_S = 60.0


def ones(n_elems: int, value: float = 1.0) -> Any:
    return np.full(n_elems, value, np.float32)


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
            assert work is not None
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
        for work in reversed(works):
            work.wait()
        assert [each[-1] for each in data] == [2, 4, 6]


# Subgroups.


def divide() -> dict[str, float]:
    sums = {}
    with shoal.init() as world:
        rank = world.rank
        groups = {
            "even": [0, 2],
            "odd": [3, 1],  # rank 3 of the world is rank 0 of this group
            "three": [1, 2, 3],
            "alone": [rank],
        }
        mine = {
            name: world.subgroup(ranks, name) for name, ranks in groups.items() if rank in ranks
        }
        for name, group in mine.items():
            assert group.rank == groups[name].index(rank)
            assert group.size == len(groups[name])
        data = {name: ones(70_001, 10.0**rank) for name in mine}
        works = [group.all_reduce(data[name], async_op=True) for name, group in mine.items()]
        for work in works:
            work.wait()
        for name, group in mine.items():
            buffer = ones(5, rank)
            group.broadcast(buffer, root=group.size - 1)
            assert buffer[0] == groups[name][-1]
            sums[name] = float(data[name][0])
        if rank in (1, 2):
            inner = mine["three"].subgroup([0, 1], "inner")
            data["inner"] = ones(4, 10.0**rank)
            inner.all_reduce(data["inner"])
            sums["inner"] = float(data["inner"][0])
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
    return sums


def test_subgroups_reduce_side_by_side_and_a_closed_one_can_be_made_again(
    forked: FileRanks,
) -> None:
    even, odd, three, inner = 101.0, 1010.0, 1110.0, 110.0
    assert forked.run(divide, 4) == [
        {"even": even, "alone": 1.0},
        {"odd": odd, "three": three, "alone": 10.0, "inner": inner},
        {"even": even, "three": three, "alone": 100.0, "inner": inner},
        {"odd": odd, "three": three, "alone": 1000.0},
    ]


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


# Deadlines, aborts and ends.


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
    for call, *given in (
        (group.all_reduce, ones(1)),
        (part.barrier,),
        (group.subgroup, [0, 1], "new"),
    ):
        assert isinstance(error_of(call, *given), Closed)
    group.abort("too late")
    part.close()
