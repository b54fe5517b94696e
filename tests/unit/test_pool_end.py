"""The end of a worker's pool: no thread waits for a rank that has left."""

import math
import threading
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shoal.engine import Fault
from shoal.errors import Closed, TimedOut, UsageError
from shoal.group.pool import pool as pools
from shoal.group.pool.ending import NumbersDiffer
from shoal.group.pool.pool import Pool
from shoal.group.pool.rails import rail_of


class View:
    """A view whose second `has_ended` returns True."""

    def __init__(self, calls: Iterable[Any] = ()) -> None:
        self.seen: list[str] = []
        self.is_settling, self.calls = True, deque(calls)
        close = lambda: self.seen.append("closed")  # noqa: E731
        self.group = SimpleNamespace(close=close, ended=lambda: None)

    @property
    def has_ended(self) -> bool:
        self.seen.append("looked")
        return len(self.seen) > 1


class Worker:
    """The groups of a worker, and its pool with one view."""

    def __init__(self, view: View) -> None:
        self.ended: list[str] = []  # the groups, in order
        self.why: Closed | None = None
        self.control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=1)
        self.control.ended = lambda: self.why or (Closed("") if self.ended else None)
        self.control.abort = lambda _why: self.ended.extend({"control"} - {*self.ended})
        self.control.notify, self.control.greet = lambda _bell: None, lambda: None
        world: Any = SimpleNamespace(fail=lambda _fault, _why: self.ended.append("world"))
        world.error = lambda: (Fault.CLOSED if "world" in self.ended else Fault.NONE, -1, "", "")
        numbers: Any = SimpleNamespace(lowest_open=lambda: 1)
        self.pool: Any = Pool(self.control, b"", world, numbers, rail_of((0, 1), 0))
        self.pool._views.append(view)


def test_a_pool_ends_during_calls_and_completes_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [SimpleNamespace(number=n, is_whole=False, is_mended=False) for n in (1, 2)]
    view = View(calls)

    def look(_call: Any) -> bool:
        view.calls.append(SimpleNamespace(number=3, is_whole=False, is_mended=False))
        return True  # as another thread may call at any moment

    monkeypatch.setattr(pools, "is_whole_here", look)
    worker = Worker(view)
    worker.pool._end()
    assert worker.pool.has_ended
    assert [call.is_mended for call in calls] == [True, True]


def test_a_call_without_a_deadline_finishes_before_the_pool_leaves() -> None:
    pool = Worker(View()).pool
    looked, went_on = threading.Event(), threading.Event()
    pool.stages.holds = lambda _number: not looked.set()

    def call() -> None:
        with pool.changed:
            pool._await_stage(7, math.inf)
            went_on.set()

    caller = threading.Thread(target=call)
    caller.start()
    looked.wait()
    with pool.changed:  # once the caller is waiting
        pass
    had_gone_on: list[bool] = []
    pool._leader = SimpleNamespace(close=lambda: had_gone_on.append(went_on.wait(5)))
    pool._end()
    caller.join()
    assert had_gone_on == [True]


def test_a_view_goes_on_after_another_worker_left() -> None:
    view = View()
    worker = Worker(view)
    worker.why = Closed("rank 1 aborted the group: it has left")
    worker.pool.stages.propose()
    worker.pool._run()
    assert view.seen == ["looked", "looked", "closed"]
    assert worker.pool.has_ended
    assert not view.is_settling
    assert not worker.pool.stages.holds(7)


def test_no_thread_waits_for_one_that_ended_with_the_workers_group() -> None:
    worker = Worker(View())
    worker.ended.append("world")
    worker.pool._run()
    assert worker.pool.has_ended
    assert worker.ended == ["world", "control"]


def test_a_worker_leaves_as_a_view_begins_without_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, view = Worker(View()), View()
    forming = worker.pool._forming
    monkeypatch.setattr(forming, "_form", lambda _number: view)

    def begin(_view: object) -> None:
        forming.close()
        worker.pool.check_world()

    with pytest.raises(Closed):
        forming.form(1, begin)
    assert worker.ended == ["control"]
    assert view.seen == ["closed"]


FAILURES = [TimedOut, UsageError, OSError, RuntimeError, MemoryError, ValueError, NumbersDiffer]


@pytest.mark.parametrize("failure", FAILURES)
def test_different_numbers_end_the_job_and_other_errors_only_the_use_of_servers(
    failure: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    view = View()
    worker = Worker(view)
    worker.control.next_command = Mock(side_effect=failure("the reason"))
    worker.pool._run()
    assert worker.pool.has_ended
    if failure is NumbersDiffer:
        assert worker.ended == ["world", "control"]
    else:
        assert worker.ended == ["control"]
        assert view.seen == ["looked", "looked", "closed"]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
