"""Stages: all workers serve each call by the same view, in any order of calls and messages."""

import itertools
from typing import Any

import pytest

from shoal.group.pool.stages import Stages

Order = tuple[int, ...]


class Job:
    """Workers that each have an order of calls, and all make the same switches in turn."""

    def __init__(self, orders: tuple[Order, ...], n_switches: int) -> None:
        n_workers = len(orders)
        self.orders, self.n_switches = orders, n_switches
        self.workers = [Stages[int]() for _ in range(n_workers)]
        self.proposals: list[list[int]] = [[] for _ in range(n_workers)]
        self.n_begun = [0] * n_workers
        self.served: list[dict[int, Any]] = [{} for _ in range(n_workers)]

    def is_made(self, rank: int) -> bool:
        return len(self.served[rank]) == len(self.orders[rank])

    def moves(self, rank: int) -> list[str]:
        stages, proposed, begun = self.workers[rank], len(self.proposals[rank]), self.n_begun[rank]
        found = []
        if not self.is_made(rank) and not stages.holds(self._next(rank)):
            found.append("call")
        if proposed == begun < self.n_switches:
            found.append("propose")
        if proposed > begun and all(len(others) > begun for others in self.proposals):
            found.append("begin")
        return found

    def move(self, rank: int, what: str) -> None:
        stages, begun = self.workers[rank], self.n_begun[rank]
        if what == "call":
            number = self._next(rank)
            self.served[rank][number] = stages.claim(number)
        elif what == "propose":
            self.proposals[rank].append(stages.propose())
        else:
            left = set(self.orders[rank]) - self.served[rank].keys()
            number = max(own[begun] for own in self.proposals)
            stages.begin(number, begun + 1, min(left, default=max(self.orders[rank]) + 1))
            self.n_begun[rank] += 1

    def _next(self, rank: int) -> int:
        return self.orders[rank][len(self.served[rank])]


def every_end(orders: tuple[Order, ...], n_switches: int) -> int:
    """Follow every order of events to its end, and check it; return the number of ends."""
    seen: set[tuple[Any, ...]] = set()
    todo: list[tuple[tuple[int, str], ...]] = [()]
    n_ends = 0
    while todo:
        way = todo.pop()
        job = Job(orders, n_switches)
        for rank, what in way:
            job.move(rank, what)
        state = (repr(job.served), repr(job.proposals), tuple(job.n_begun))
        if state in seen:
            continue
        seen.add(state)
        ranks = range(len(orders))
        moves = [(rank, what) for rank in ranks for what in job.moves(rank)]
        todo += [(*way, move) for move in moves]
        if not moves:
            n_ends += 1
            # No worker is held back forever, and a call has the same view on all workers.
            assert job.n_begun == [n_switches] * len(orders)
            assert all(map(job.is_made, ranks))
            assert all(served == job.served[0] for served in job.served)
    return n_ends


@pytest.mark.parametrize(("n_workers", "n_switches"), [(1, 3), (2, 2), (3, 1)])
def test_workers_agree_on_each_calls_view_in_every_order(n_workers: int, n_switches: int) -> None:
    assert every_end(((1, 2, 3),) * n_workers, n_switches) > 1


@pytest.mark.parametrize("order", list(itertools.permutations((2, 3, 5))))
def test_workers_agree_though_their_numbers_have_different_orders(order: Order) -> None:
    assert every_end(((2, 3, 5), order), 2) > 1


def test_a_stage_begins_after_the_one_proposed_earlier_and_is_dropped_if_unreachable() -> None:
    stages = Stages[str]()
    assert stages.propose() == 0
    stages.begin(5, "first", 0)
    assert stages.propose() == 5
    stages = Stages[int]()
    for view in range(1000):
        stages.begin(stages.propose(), view, view)
        assert stages.claim(view) == view
    assert len(stages._stages) <= 2


def test_a_call_that_is_held_back_cannot_be_made() -> None:
    stages = Stages[str]()
    stages.claim(1)
    stages.propose()
    assert stages.holds(2)
    with pytest.raises(ValueError, match="call 2 is held back"):
        stages.claim(2)
