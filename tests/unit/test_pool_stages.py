"""Stages: whatever the order in which workers call and hear, each call is served alike on all."""

from typing import Any

import pytest

from shoal.group.pool.stages import Stages

N_CALLS = 3  # of each worker; a switch may come before, between and after them


class Job:
    """Workers, and switches that all of them make one after another."""

    def __init__(self, n_workers: int, n_switches: int) -> None:
        self.n_switches = n_switches
        self.workers = [Stages[int]() for _ in range(n_workers)]
        self.proposals: list[list[int]] = [[] for _ in range(n_workers)]
        self.n_begun = [0] * n_workers
        self.served: list[list[Any]] = [[] for _ in range(n_workers)]

    def moves(self, rank: int) -> list[str]:
        stages, proposed, begun = self.workers[rank], len(self.proposals[rank]), self.n_begun[rank]
        found = []
        if len(self.served[rank]) < N_CALLS and not stages.holds:
            found.append("call")
        if proposed == begun < self.n_switches:
            found.append("propose")
        if proposed > begun and all(len(others) > begun for others in self.proposals):
            found.append("begin")
        return found

    def move(self, rank: int, what: str) -> None:
        stages, begun = self.workers[rank], self.n_begun[rank]
        if what == "call":
            self.served[rank].append(stages.claim())
        elif what == "propose":
            self.proposals[rank].append(stages.propose())
        else:
            stages.begin(max(own[begun] for own in self.proposals), begun + 1)
            self.n_begun[rank] += 1


def every_end(n_workers: int, n_switches: int) -> int:
    """Go every way there is to the end, and look at each end; how many there were."""
    seen: set[tuple[Any, ...]] = set()
    todo: list[tuple[tuple[int, str], ...]] = [()]
    n_ends = 0
    while todo:
        way = todo.pop()
        job = Job(n_workers, n_switches)
        for rank, what in way:
            job.move(rank, what)
        state = (repr(job.served), repr(job.proposals), tuple(job.n_begun))
        if state in seen:
            continue
        seen.add(state)
        moves = [(rank, what) for rank in range(n_workers) for what in job.moves(rank)]
        todo += [(*way, move) for move in moves]
        if not moves:
            n_ends += 1
            # Nobody is held back for ever, and the n-th call of each worker has the same view.
            assert job.n_begun == [n_switches] * n_workers
            assert [len(served) for served in job.served] == [N_CALLS] * n_workers
            assert all(served == job.served[0] for served in job.served)
    return n_ends


@pytest.mark.parametrize(("n_workers", "n_switches"), [(1, 3), (2, 2), (3, 1)])
def test_workers_agree_on_who_serves_each_call_in_every_order_of_events(
    n_workers: int, n_switches: int
) -> None:
    assert every_end(n_workers, n_switches) > 1


def test_a_stage_that_was_to_begin_later_is_not_overtaken_by_the_next() -> None:
    stages = Stages[str]()
    assert stages.propose() == 0
    stages.begin(5, "first")
    assert stages.propose() == 5
    stages.begin(5, None)
    assert [stages.claim() for _ in range(6)] == [(number, None) for number in range(6)]


def test_a_call_that_is_held_back_cannot_be_made() -> None:
    stages = Stages[str]()
    stages.propose()
    assert stages.holds
    with pytest.raises(ValueError, match="call 0 is held back"):
        stages.claim()


def test_stages_that_nobody_can_reach_any_more_are_forgotten() -> None:
    stages = Stages[int]()
    for view in range(1000):
        stages.begin(stages.propose(), view)
        assert stages.claim() == (view, view)
    assert len(stages._stages) <= 2
