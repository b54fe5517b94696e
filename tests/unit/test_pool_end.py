"""How a worker's pool ends: whatever others do meanwhile, nobody waits in vain."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import Fault
from shoal.errors import Closed, TimedOut, UsageError
from shoal.group.pool import pool as pools
from shoal.group.pool.ending import NumbersDiffer
from shoal.group.pool.pool import Pool
from shoal.group.pool.rails import rail_of


def test_a_pool_ends_while_calls_are_made_and_tells_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(number: int) -> Any:
        return SimpleNamespace(number=number, is_whole=False, is_mended=False)

    calls = deque([make(1), make(2)])

    def look(_call: Any) -> bool:
        calls.append(make(3))  # as another thread may, at any moment
        return True

    monkeypatch.setattr(pools, "is_whole_here", look)
    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=0)
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool = Pool(control, b"", nothing, nothing, rail)
    view: Any = SimpleNamespace(calls=calls, group=SimpleNamespace(close=lambda: None))
    pool._views.append(view)
    pool._end()
    assert pool.has_ended
    assert [call.is_mended for call in list(calls)[:2]] == [True, True]


def test_what_others_left_in_good_order_goes_on_until_its_view_ends_and_nothing_is_held_back() -> (
    None
):
    """Of a group that its world outlives: the pool's threads talk in one of their own."""
    seen: list[str] = []

    class View:
        is_settling, calls = True, deque[Any]()
        group = SimpleNamespace(close=lambda: seen.append("closed"), ended=lambda: None)

        @property
        def has_ended(self) -> bool:
            seen.append("looked")
            return len(seen) > 1

    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=0)
    control.ended = lambda: Closed("rank 1 aborted the group: it has left")
    control.notify, control.greet = lambda _bell: None, lambda: None
    world: Any = SimpleNamespace(error=lambda: (Fault.NONE, -1, "", ""))
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool, view = Pool(control, b"", world, nothing, rail), View()
    pool._views.append(view)  # type: ignore[arg-type]
    pool.stages.propose()
    pool._run()
    assert seen == ["looked", "looked", "closed"]
    assert pool.has_ended
    assert not view.is_settling
    assert not pool.stages.holds(7)


@pytest.mark.parametrize(
    "failure",
    [
        TimedOut("rank 0 does not answer"),
        UsageError("no port of SHOAL_PORT_RANGE is free"),
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        ValueError("a command that makes no sense"),
        NumbersDiffer("rank 1 called all_reduce #7, but rank 0 skipped #7"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_only_numbers_that_differ_end_the_job_and_all_else_the_search_for_servers(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """While a view serves, which goes on until its servers are lost."""
    ended: list[str] = []
    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=1)
    control.ended = lambda: Closed(ended[0]) if ended else None
    control.abort = lambda _why: ended.append("control")
    world: Any = SimpleNamespace(fail=lambda _fault, _why: ended.append("world"))
    world.error = lambda: (Fault.CLOSED if "world" in ended else Fault.NONE, -1, "", "")
    control.notify, control.greet = lambda _bell: None, lambda: None

    def fail(*_: object) -> None:
        raise failure

    control.next_command = fail
    looks: list[None] = []

    class View:
        is_settling, calls = True, deque[Any]()
        group = SimpleNamespace(close=lambda: None, ended=lambda: None)

        @property
        def has_ended(self) -> bool:
            looks.append(None)
            return len(looks) > 1

    rail = rail_of((0, 1), 0)
    assert rail is not None
    numbers: Any = SimpleNamespace(lowest_open=lambda: 1)
    pool = Pool(control, b"", world, numbers, rail)
    pool._views.append(View())  # type: ignore[arg-type]
    pool._run()
    assert pool.has_ended
    if isinstance(failure, NumbersDiffer):
        assert ended == ["world", "control"]
    else:
        assert ended == ["control"]
        assert len(looks) == 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
