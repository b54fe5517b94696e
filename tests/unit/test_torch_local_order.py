"""The common order in which ranks of a host begin turns, over a real group."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from unit.in_process import run_in_threads, run_well

from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.frontend.torch.gpu.local_order import LocalOrder, Turn

SIZE, N_CALLS = 3, 12


class Said:
    """The events of all ranks, on one time line."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ranks: dict[Turn, set[int]] = {}
        self.too_early: list[Turn] = []

    def ready(self, turn: Turn, rank: int) -> None:
        with self.lock:
            self.ranks.setdefault(turn, set()).add(rank)

    def begun(self, turn: Turn) -> None:
        with self.lock:
            if len(self.ranks[turn]) < SIZE:
                self.too_early.append(turn)


def follow(group: Any, seed: int, errors: Said) -> list[Turn]:
    """Run one rank, which becomes ready for turns and makes calls in a random order."""
    order, choose = (
        LocalOrder(group.subgroup(range(SIZE), "host")),
        random.Random(seed + group.rank),
    )
    coming, begun = [Turn(call, 0) for call in range(N_CALLS)], list[Turn]()
    n_made = 0
    while len(begun) < 2 * N_CALLS:
        if n_made < N_CALLS and choose.random() < 0.3:
            assert order.add(60.0) == n_made
            n_made += 1
        may = [turn for turn in coming if turn.call < n_made]
        if may and choose.random() < 0.5:
            turn = choose.choice(may)
            coming.remove(turn)
            errors.ready(turn, group.rank)
            order.ready(turn, "it", 60.0)
        if (turn_now := order.next()) is not None:
            errors.begun(turn_now)
            begun.append(turn_now)
            if not turn_now.half:
                coming.append(Turn(turn_now.call, 1))
    group.barrier()
    order.close()
    return begun


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_begin_the_same_turns_in_the_same_order_once_all_are_ready(seed: int) -> None:
    errors = Said()
    begun, *others = run_well(follow, SIZE, 100 * seed, errors)
    assert others == [begun] * (SIZE - 1)
    assert [turn.call for turn in begun if not turn.half] == list(range(N_CALLS))
    assert sorted(begun) == [Turn(call, half) for call in range(N_CALLS) for half in (0, 1)]
    assert errors.too_early == []


def one_is_missing(group: Any) -> ShoalError | None:
    order = LocalOrder(group.subgroup(range(SIZE), "host"))
    order.add(60.0)
    error = None
    if group.rank != 1:
        order.ready(Turn(0, 0), "it", 0.05)
        try:
            while order.next() is None:
                pass
        except ShoalError as raised:
            error = raised
    group.barrier()
    return error


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    first, second, third = run_in_threads(one_is_missing, SIZE)
    assert second is None
    errors = [first, third]
    assert all(isinstance(error, TimedOut) for error in errors), errors
    assert any("rank 1" in str(error) for error in errors), errors


def one_brings_another_turn(group: Any) -> str:
    order = LocalOrder(group.subgroup(range(SIZE), "host"))
    order.add(60.0)
    order.ready(Turn(0, 0), f"float32[{8 + group.rank // 2}]", 60.0)
    try:
        while order.next() is None:
            pass
    except UsageError as error:
        return str(error)
    finally:
        group.barrier()
    return ""


def test_ranks_with_different_turns_get_an_error_and_begin_none() -> None:
    # NCCL would not detect it.
    errors = run_in_threads(one_brings_another_turn, SIZE)
    assert (
        "this rank has called float32[8], but another rank of this host made a different"
        in errors[0]
    )
    assert "this rank has called float32[9]" in errors[2]
