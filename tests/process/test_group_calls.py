"""Calls on a group: in flight, in subgroups, and at its end.

unit/test_work.py covers callbacks, test_state.py deadlines, test_group_ahead.py any order of calls.
"""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
from process.ranks import FileRanks
from process.stage import error_of

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError

LONG_S = 60.0


def ones(n_elems: int, value: float = 1.0) -> Any:
    return np.full(n_elems, value, np.float32)


def drop_buffers_in_flight() -> float:
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
        return float(last[0])


def test_a_dropped_buffer_lives_exactly_until_its_call_is_done(forked: FileRanks) -> None:
    assert forked.run(drop_buffers_in_flight, 2) == [2.0, 2.0]


def close_while_threads_call() -> set[str]:
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
        return set(ended)


def test_a_group_may_be_closed_while_other_threads_make_calls(forked: FileRanks) -> None:
    assert forked.run(close_while_threads_call, 1) == [{"Closed"}]


def call_while_another_waits() -> bool:
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
        return n_kept <= 2


def test_a_long_call_does_not_hold_the_buffers_of_later_calls(forked: FileRanks) -> None:
    assert forked.run(call_while_another_waits, 2) == [True, True]


def make_calls_with_one_name() -> list[float]:
    with shoal.init() as group:
        data = [ones(length, place + 1) for place, length in enumerate((2_000_000, 1, 40_000))]
        works = [group.all_reduce(each, name="alike", async_op=True) for each in data]
        for work in reversed(works):
            work.wait()
        return [float(each[-1]) for each in data]


def test_calls_with_one_name_match_in_order_while_all_are_in_flight(forked: FileRanks) -> None:
    assert forked.run(make_calls_with_one_name, 2) == [[2.0, 4.0, 6.0]] * 2


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


def two_worlds() -> list[float]:
    results = []
    with shoal.init() as first, shoal.init() as second:
        for group in (first, second, first):
            data = ones(100_003, group.rank)
            group.all_reduce(data)
            results.append(float(data[-1]))
        second.close()
        second.close()
        data = ones(3)
        first.all_reduce(data)
        results.append(float(data[0]))
    return results


def test_two_worlds_in_one_process_do_not_affect_each_other(forked: FileRanks) -> None:
    assert forked.run(two_worlds, 3) == [[3.0, 3.0, 3.0, 3.0]] * 3


# Deadlines, aborts and ends.


def wait_too_briefly() -> float:
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
        return float(data[0])


def test_a_wait_that_times_out_does_not_end_the_call(forked: FileRanks) -> None:
    assert forked.run(wait_too_briefly, 2) == [2.0, 2.0]


def abort() -> tuple[Exception | None, float, list[Exception | None]]:
    with shoal.init() as world:
        group = world.subgroup([0, 1, 2], "part")
        if world.rank == 0:
            group.abort("enough")
        of_subgroup = error_of(group.barrier)
        data = ones(7)
        world.all_reduce(data)
        if world.rank == 1:
            for other in (0, 2):  # both ranks have their sums
                world.recv(bytearray(1), other)
            world.abort("the loss is not a number")
        else:
            world.send(b"!", 1)
        errors = [error_of(world.all_reduce, ones(1000)), error_of(world.barrier)]
        return of_subgroup, float(data[0]), errors


def test_an_abort_ends_only_its_group_on_every_rank_with_its_reason(forked: FileRanks) -> None:
    for of_subgroup, total, errors in forked.run(abort, 3):
        assert isinstance(of_subgroup, Closed)
        assert "enough" in str(of_subgroup)
        assert total == 3.0
        for error in errors:
            assert isinstance(error, Closed), error
            assert "rank 1" in str(error)
            assert "the loss is not a number" in str(error)


def closed_calls() -> list[Exception | None]:
    group = shoal.init()
    part = group.subgroup([0, 1], "part")
    group.barrier()
    pending = group.recv(bytearray(1), 1 - group.rank, 4, work=True)
    group.close()
    ended = error_of(pending.wait)
    return [
        ended,
        error_of(group.all_reduce, ones(1)),
        error_of(part.barrier),
        error_of(group.subgroup, [0, 1], "new"),
        error_of(group.abort, "too late"),
        error_of(part.close),
    ]


def test_calls_on_a_closed_group_are_errors(forked: FileRanks) -> None:
    for ended, reduce, barrier, subgroup, abort, close in forked.run(closed_calls, 2):
        # The second rank to close may receive the other's goodbye first.
        assert isinstance(ended, (Closed, PeerLost)), ended
        for error in (reduce, barrier, subgroup):
            assert isinstance(error, Closed), error
        assert abort is None
        assert close is None
