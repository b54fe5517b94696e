"""How a worker's pool ends: whatever others do meanwhile, nobody waits in vain."""

import contextlib
import socket
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import Fault
from shoal.errors import Closed
from shoal.group.pool import pool as pools
from shoal.group.pool.commands import End, Follower, LeaderGone, encode
from shoal.group.pool.pool import ServerPool
from shoal.group.pool.rails import rail_of
from shoal.group.pool.stages import Stages
from shoal.rendezvous import TcpStoreClient, TcpStoreServer

KEY = bytes(32)


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


def test_a_worker_whose_connection_to_rank_0_is_lost_hears_what_was_said_meanwhile() -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0, key=KEY)) as store:
        control: Any = SimpleNamespace(tell=lambda _text: f"127.0.0.1 {store.port}")
        control.ended = lambda: None
        follower, nothing = Follower(KEY), ((), Stages[Any](), 1)
        follower.begin(control)
        assert follower._client is not None
        follower._client.close()  # as after 5.5 s without an answer
        said = End(7, is_lost=False)
        with contextlib.closing(TcpStoreClient("127.0.0.1", store.port, timeout_s=9, key=KEY)) as c:
            c.set("command/0", encode(said))
        assert follower.next(*nothing) is None
        assert follower.next(*nothing) == said
        follower.close()


class Paused(threading.Event):
    """Counts how often somebody waits for it, for how long at most."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def test_a_worker_asks_a_store_that_ends_every_connection_only_now_and_then() -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0, key=KEY)) as store:
        control: Any = SimpleNamespace(tell=lambda _text: f"127.0.0.1 {store.port}")
        control.ended = lambda: None
        follower = Follower(KEY)
        follower._closing = closing = Paused()
        follower.begin(control)
        for _ in range(3):
            assert follower._client is not None
            follower._client.close()  # as by the store, at once
            assert follower.next((), Stages[Any](), 1) is None
        follower.close()
    assert closing.waits == [0.1] * 3


def test_a_worker_does_not_look_for_rank_0_once_that_has_left() -> None:
    store = TcpStoreServer("127.0.0.1", 0, key=KEY)
    control: Any = SimpleNamespace(tell=lambda _text: f"127.0.0.1 {store.port}")
    control.ended = lambda: Closed("rank 0 aborted the group: it has left")
    follower = Follower(KEY)
    follower.begin(control)
    store.close()
    with pytest.raises(LeaderGone):
        follower.next((), Stages[Any](), 1)
    follower.close()


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_cannot_reach_rank_0_ends_the_group_if_that_lives_and_would_wait(
    lives: bool,
) -> None:
    def begin(_control: object) -> None:
        raise LeaderGone("no answer")

    ended: list[str] = []
    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=1, leader=0)
    control.ended = lambda: None if lives else Closed("rank 0 aborted the group: it has left")
    control.abort = ended.append
    commands: Any = SimpleNamespace(close=lambda: None, begin=begin)
    world: Any = SimpleNamespace(abort=ended.append)
    world.error = lambda: (Fault.CLOSED if ended else Fault.NONE, -1, "", "")
    view: Any = SimpleNamespace(has_ended=True, is_settling=False, calls=[])
    view.group = SimpleNamespace(close=lambda: None)
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool = ServerPool(control, commands, b"", world, nothing, rail)
    pool._views.append(view)
    pool._run()
    assert pool.has_ended
    assert ended == (["rank 1 cannot use servers any more: no answer"] * 2 if lives else [])


def test_a_thread_that_fails_ends_both_groups_in_which_others_may_wait_for_it() -> None:
    def begin(_control: object) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[tuple[str, str]] = []
    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=1)
    control.abort = lambda why: ended.append(("control", why))
    world: Any = SimpleNamespace(abort=lambda why: ended.append(("world", why)))
    commands: Any = SimpleNamespace(close=lambda: None, begin=begin)
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool = ServerPool(control, commands, b"", world, nothing, rail)
    pool._run()
    assert pool.has_ended
    assert [which for which, _ in ended] == ["world", "control"]
    assert all("can't start new thread" in why for _, why in ended)
