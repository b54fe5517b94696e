"""Wrong calls: all ranks soon get an error that names both sides, and other calls go on.

The native tests of messages and exchanges cover blocks whose length differs between two ranks.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import Closed, UsageError

ODD = 1  # the rank with the other call
# The design promises one second; a busy machine gets more. Waiting for a deadline takes a minute.
SOON_S = 10.0

Call = Callable[[shoal.Group], Any]


def array(n_elems: int, dtype: str = "float32") -> Any:
    return np.ones(n_elems, dtype)


def bfloat16(n_elems: int) -> shoal.BufferView:
    bits = array(n_elems, "uint16")
    return shoal.BufferView(bits.ctypes.data, n_elems, shoal.DType.BFLOAT16, bits)


def reduce_then_broadcast(group: shoal.Group) -> None:
    group.all_reduce(array(100))
    group.broadcast(array(100))


def broadcast_then_reduce(group: shoal.Group) -> None:
    group.broadcast(array(100))
    group.all_reduce(array(100))


# A call, and its name in errors.
Side = tuple[Call, str]


def reduces(n_elems: int, dtype: str = "float32", op: str = "sum") -> Side:
    words = f"all_reduce {dtype}[{n_elems}] {op}"
    return lambda group: group.all_reduce(array(n_elems, dtype), op), words


def broadcasts(n_elems: int, root: int = 0) -> Side:
    words = f"broadcast float32[{n_elems}] from rank {root}"
    return lambda group: group.broadcast(array(n_elems), root), words


def gathers(n_elems: int) -> Side:
    words = f"all_gather float32[{n_elems}]"
    return lambda group: group.all_gather(array(n_elems * group.size), array(n_elems)), words


def gathers_unevenly(shortest: int) -> Side:
    words = f"all_gather float32[{shortest},{shortest + 1}"
    return lambda group: group.all_gather(
        [array(shortest + r) for r in range(group.size)], array(shortest + group.rank)
    ), words


# By name: the call of most ranks, and the call of the odd rank.
CASES: dict[str, tuple[Side, Side]] = {
    "shorter": (reduces(2048), reduces(1024)),
    "longer by megabytes": (reduces(1 << 20), reduces(4 << 20)),
    "shared and shorter by megabytes": (
        (lambda group: group.all_reduce(shoal.empty(4 << 20)), "float32[4194304]"),
        (lambda group: group.all_reduce(shoal.empty(1 << 20)), "float32[1048576]"),
    ),
    "empty": (reduces(10), reduces(0)),
    "another algorithm's length": (reduces(64), reduces(1 << 20)),
    "wider type of as many elements": (reduces(64), reduces(64, "float64")),
    "integers of as many bytes": (reduces(64), reduces(64, "int32")),
    "the other half precision": (
        reduces(64, "float16"),
        (lambda group: group.all_reduce(bfloat16(64)), "bfloat16[64]"),
    ),
    "another operation": (reduces(64), reduces(64, op="max")),
    "the average": (reduces(300_000), reduces(300_000, op="avg")),
    "broadcast instead": (reduces(100), broadcasts(100)),
    "big broadcast instead": (reduces(1 << 20), broadcasts(1 << 20)),
    "another order": (
        (reduce_then_broadcast, "all_reduce float32[100]"),
        (broadcast_then_reduce, "broadcast float32[100]"),
    ),
    "barrier instead": (reduces(1, "uint8", "bor"), (lambda group: group.barrier(), "barrier")),
    "another root": (broadcasts(100), broadcasts(100, ODD)),
    "broadcast into more": (broadcasts(100), broadcasts(101)),
    "gather of more": (gathers(10), gathers(11)),
    "another block longer": (gathers_unevenly(3), gathers_unevenly(4)),
    "another length of the same name": (
        (lambda group: group.all_reduce(array(10), name="bucket 7"), "float32[10]"),
        (lambda group: group.all_reduce(array(20), name="bucket 7"), "float32[20]"),
    ),
}


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (4, 2), (4, 1)])
@on_ranks()
def test_a_mismatched_call_raises_on_every_rank_and_names_both_calls(
    size: int, ranks_per_host: int
) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as world:
        for name, case in CASES.items():
            call, _ = case[1 if world.rank == ODD else 0]
            group = world.subgroup(range(size), name)
            world.barrier()
            started = time.monotonic()
            # One rank's call may need no other rank: then its next call fails.
            error = error_of(call, group) or error_of(group.barrier)
            took_s, where = time.monotonic() - started, f"{name}: {error!r}"
            assert isinstance(error, UsageError), where
            text = str(error)
            assert f"rank {ODD} (" in text, where
            for _, words in case:
                assert words in text, where
            assert text.count(" called ") == 2, where
            assert "same calls" in text, where
            assert took_s < SOON_S, where
            world.barrier()


N_ELEMS = 1 << 20
# Every 0.1 s the background thread reports revoked memory to peers.
ROUNDS_S = 0.3


def go_round(group: shoal.Group) -> None:
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
def test_an_ended_group_does_not_affect_anothers_calls_over_one_array(ranks_per_host: int) -> None:
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
