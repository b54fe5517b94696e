"""How a worker's pool ends: whatever others do meanwhile, nobody waits in vain."""

import socket
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import Fault
from shoal.errors import Closed
from shoal.group.pool import pool as pools
from shoal.group.pool.commands import Follower
from shoal.group.pool.pool import ServerPool
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
    commands: Any = SimpleNamespace(close=lambda: None)
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool = ServerPool(control, commands, b"", nothing, nothing, rail)
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
        group = SimpleNamespace(close=lambda: seen.append("closed"))

        @property
        def has_ended(self) -> bool:
            seen.append("looked")
            return len(seen) > 1

    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=0)
    control.ended = lambda: Closed("rank 1 aborted the group: it has left")
    commands: Any = SimpleNamespace(close=lambda: None, begin=lambda _control: None)
    world: Any = SimpleNamespace(error=lambda: (Fault.NONE, -1, "", ""))
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool, view = ServerPool(control, commands, b"", world, nothing, rail), View()
    pool._views.append(view)  # type: ignore[arg-type]
    pool.stages.propose()
    pool._run()
    assert seen == ["looked", "looked", "closed"]
    assert pool.has_ended
    assert not view.is_settling
    assert not pool.stages.holds(7)


def test_a_worker_that_leaves_before_it_has_found_rank_0_looks_no_further() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        control: Any = SimpleNamespace(tell=lambda _text: f"127.0.0.1 {nobody.getsockname()[1]}")
        follower = Follower(bytes(32))
        follower.close()
        with pytest.raises(Closed, match="nobody waits for the store"):
            follower.begin(control)
