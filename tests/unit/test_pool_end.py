"""How a worker's pool ends: whatever others do meanwhile, nobody waits in vain."""

import contextlib
import logging
import socket
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import Fault
from shoal.errors import Closed, TimedOut, UsageError
from shoal.group.pool import commands
from shoal.group.pool import pool as pools
from shoal.group.pool.commands import End, Follower, encode
from shoal.group.pool.pool import Pool
from shoal.group.pool.rails import rail_of
from shoal.group.pool.settling import NumbersDiffer
from shoal.group.pool.stages import Stages
from shoal.rendezvous.store.server import TcpStoreServer

KEY = bytes(32)
NOTHING: Any = ((), Stages[Any](), 1)


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
    pool = Pool(control, commands, b"", nothing, nothing, rail)
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
    commands: Any = SimpleNamespace(close=lambda: None, begin=lambda _control: None)
    world: Any = SimpleNamespace(error=lambda: (Fault.NONE, -1, "", ""))
    nothing: Any = None
    rail = rail_of((0, 1), 0)
    assert rail is not None
    pool, view = Pool(control, commands, b"", world, nothing, rail), View()
    pool._views.append(view)  # type: ignore[arg-type]
    pool.stages.propose()
    pool._run()
    assert seen == ["looked", "looked", "closed"]
    assert pool.has_ended
    assert not view.is_settling
    assert not pool.stages.holds(7)


def follower_of(port: int, ended: list[Closed]) -> Follower:
    """One whose rank 0 serves its store there, and lives as long as nothing has ended."""
    control: Any = SimpleNamespace(tell=lambda _text: f"127.0.0.1 {port}")
    control.ended = lambda: ended[0] if ended else None
    follower = Follower(KEY)
    follower.begin(control)
    return follower


def test_a_worker_that_leaves_before_it_has_found_rank_0_looks_no_further() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        follower = follower_of(nobody.getsockname()[1], [])
        follower.close()
        assert follower.next(*NOTHING) is None


def test_a_worker_whose_connection_to_rank_0_is_lost_hears_what_was_said_meanwhile() -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0, key=KEY)) as store:
        follower = follower_of(store.port, [])
        follower._connect()
        assert follower._client is not None
        follower._client.close()  # as after 5.5 s without an answer
        said = End(7, is_lost=False)
        store.set("command/0", encode(said))
        assert follower.next(*NOTHING) is None
        assert follower.next(*NOTHING) == said
        follower.close()


def test_a_worker_waits_for_a_silent_rank_0_as_long_as_that_lives_and_logs_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commands, "_CONNECT_S", 0.01)
    caplog.set_level(logging.INFO, "shoal")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        follower = follower_of(silent.getsockname()[1], [])
        assert [follower.next(*NOTHING) for _ in range(3)] == [None] * 3
    assert sum("until rank 0 answers" in record.message for record in caplog.records) == 1
    said = End(7, is_lost=False)
    port = int(follower._where.split()[1])
    monkeypatch.setattr(commands, "_CONNECT_S", 10.0)
    with contextlib.closing(TcpStoreServer("127.0.0.1", port, key=KEY)) as store:
        store.set("command/0", encode(said))
        assert follower.next(*NOTHING) == said
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
        follower = follower_of(store.port, [])
        follower._closing = closing = Paused()
        for _ in range(3):
            follower._connect()
            assert follower._client is not None
            follower._client.close()  # as by the store, at once
            assert follower.next(*NOTHING) is None
        follower.close()
    assert closing.waits == [0.1] * 3


def test_a_worker_does_not_look_for_rank_0_once_that_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, ended = TcpStoreServer("127.0.0.1", 0, key=KEY), list[Closed]()
    follower = follower_of(store.port, ended)
    store.close()
    ended.append(Closed("rank 0 aborted the group: it has left"))
    assert follower.next(*NOTHING) is None
    assert caplog.records == []
    follower.close()


@pytest.mark.parametrize(
    "failure",
    [
        TimedOut("rank 0 does not answer"),
        UsageError("no port of SHOAL_PORT_RANGE is free"),
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        ValueError("a command that makes no sense"),
        NumbersDiffer("rank 1 made all_reduce 7, whose number rank 0 skipped"),
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
    asked: Any = SimpleNamespace(close=lambda: None, begin=lambda _control: None)

    def fail(*_: object) -> None:
        raise failure

    asked.next = fail
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
    pool = Pool(control, asked, b"", world, numbers, rail)
    pool._views.append(View())  # type: ignore[arg-type]
    pool._run()
    assert pool.has_ended
    if isinstance(failure, NumbersDiffer):
        assert ended == ["world", "control"]
    else:
        assert ended == ["control"]
        assert len(looks) == 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
