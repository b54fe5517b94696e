"""Callbacks of calls, with calls that the test ends by hand: no native code, no clock."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from unit.fakes import UnseenWork, refuse_threads

from shoal.errors import ShoalError
from shoal.group import work as module
from shoal.group.work import COMPLETIONS, Work, follow

LONG_S = 60.0


class Mesh:
    """Counts ended calls, as the native mesh does."""

    def __init__(self) -> None:
        self.n_ended, self.n_seen = 0, -1
        self.changed = threading.Condition()


class Call:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._is_done = mesh, False

    def end(self) -> None:
        with self._mesh.changed:
            self._is_done = True
            self._mesh.n_ended += 1
            self._mesh.changed.notify_all()

    def done(self) -> bool:
        return self._is_done


def wait_for_an_end(work: Work, seen: int) -> int:
    """Stand in for the native mesh."""
    mesh: Any = work.mesh
    with mesh.changed:
        mesh.n_seen = seen
        mesh.changed.notify_all()
        assert mesh.changed.wait_for(lambda: mesh.n_ended != seen, LONG_S)
        return int(mesh.n_ended)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setattr(module, "wait_for_an_end", wait_for_an_end)
    return Mesh()


def started(mesh: Mesh, n: int) -> tuple[list[Call], list[Work]]:
    calls = [Call(mesh) for _ in range(n)]
    group: Any = SimpleNamespace(mesh=mesh, error_from=lambda _native: None)
    return calls, [Work(group, call, []) for call in calls]


def test_calls_that_end_out_of_order_call_back_as_they_end(mesh: Mesh) -> None:
    notified = queue.SimpleQueue[Work]()
    calls, works = started(mesh, 4)
    for work in works:
        work.on_done(notified.put)
    for which in (2, 0, 3, 1):
        calls[which].end()
        assert notified.get(timeout=LONG_S) is works[which]


def test_an_ended_call_calls_back_while_another_runs(mesh: Mesh) -> None:
    notified = queue.SimpleQueue[Work]()
    (first, second), works = started(mesh, 2)
    works[0].on_done(notified.put)
    second.end()
    with mesh.changed:  # the thread waits for the next end
        assert mesh.changed.wait_for(lambda: mesh.n_seen == mesh.n_ended == 1, LONG_S)
    works[1].on_done(notified.put)
    assert notified.get(timeout=LONG_S) is works[1]
    first.end()
    assert notified.get(timeout=LONG_S) is works[0]


def test_calls_of_one_mesh_do_not_wait_for_another_mesh(mesh: Mesh) -> None:
    notified, other = queue.SimpleQueue[Work](), Mesh()
    (first,), (early,) = started(mesh, 1)
    (second,), (late,) = started(other, 1)
    early.on_done(notified.put)
    late.on_done(notified.put)
    second.end()
    assert notified.get(timeout=LONG_S) is late
    first.end()
    assert notified.get(timeout=LONG_S) is early


def test_a_raising_callback_stops_no_other(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    notified = queue.SimpleQueue[Work]()
    calls, works = started(mesh, 2)
    works[0].on_done(lambda _: 1 / 0)
    works[1].on_done(notified.put)
    for call in calls:
        call.end()
    assert notified.get(timeout=LONG_S) is works[1]
    assert "a callback of a finished call failed" in caplog.text


def test_the_end_of_the_program_waits_for_callbacks(mesh: Mesh) -> None:
    notified, completions = queue.SimpleQueue[Work](), type(COMPLETIONS)()
    (call,), (work,) = started(mesh, 1)
    completions.add(work, notified.put)
    call.end()
    completions.finish()
    assert [notified.get_nowait(), notified.empty()] == [work, True]


def test_without_threads_ended_calls_call_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETIONS", type(COMPLETIONS)())
    refuse_threads(monkeypatch)
    notified = queue.SimpleQueue[Work]()
    (call,), (work,) = started(mesh, 1)
    with pytest.raises(ShoalError, match="shoal-completions"):
        work.on_done(notified.put)
    call.end()
    assert notified.empty()
    work.on_done(notified.put)
    assert [notified.get_nowait(), notified.empty()] == [work, True]


def test_following_a_call_without_a_thread_waits(caplog: pytest.LogCaptureFixture) -> None:
    notified: list[Any] = []
    work: Any = UnseenWork()
    work.failure = ShoalError("the call failed")
    follow(work, notified.append)
    assert notified == [work]
    assert work.waits == [None]
    assert "could not start the thread shoal-completions" in caplog.text
