"""Mismatched calls: all ranks soon get an error that names both calls.

The native tests of messages and exchanges cover blocks whose length differs between two ranks.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from process.ranks import FileRanks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import UsageError

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


def disagree(ranks_per_host: int) -> dict[str, tuple[float, Exception | None]]:
    """Run every case in a new group; return the time until its error, and the error."""
    pretend_hosts(ranks_per_host)
    results: dict[str, tuple[float, Exception | None]] = {}
    with shoal.init() as world:
        for name, case in CASES.items():
            call, _ = case[1 if world.rank == ODD else 0]
            group = world.subgroup(range(world.size), name)
            world.barrier()
            started = time.monotonic()
            # One rank's call may need no other rank: then its next call fails.
            error = error_of(call, group) or error_of(group.barrier)
            results[name] = time.monotonic() - started, error
            world.barrier()
    return results


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (4, 2), (4, 1)])
def test_a_mismatched_call_raises_on_every_rank_and_names_both_calls(
    size: int, ranks_per_host: int, forked: FileRanks
) -> None:
    for rank, results in enumerate(forked.run(disagree, size, ranks_per_host)):
        assert results.keys() == CASES.keys()
        for name, (took_s, error) in results.items():
            where = f"{name}, rank {rank}: {took_s:.2f} s, {error!r}"
            assert isinstance(error, UsageError), where
            text = str(error)
            assert f"rank {ODD} (" in text, where
            for _, words in CASES[name]:
                assert words in text, where
            assert text.count(" called ") == 2, where
            assert "same calls" in text, where
            assert took_s < SOON_S, where
