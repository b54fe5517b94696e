"""Callbacks of calls, with calls that the test ends by hand: no native code, no clock."""

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


class Notified:
    """Records the works that have called back."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._came = threading.Semaphore(0)

    def __call__(self, work: Work) -> None:
        self.works.append(work)
        self._came.release()

    def next(self) -> Work:
        assert self._came.acquire(timeout=LONG_S)
        return self.works[-1]


def started(mesh: Mesh, n: int) -> tuple[list[Call], list[Work]]:
    calls = [Call(mesh) for _ in range(n)]
    group: Any = SimpleNamespace(mesh=mesh, error_from=lambda _native: None)
    return calls, [Work(group, call, None) for call in calls]


def test_calls_that_end_out_of_order_call_back_as_they_end(mesh: Mesh) -> None:
    notified = Notified()
    calls, works = started(mesh, 4)
    for work in works:
        work.on_done(notified)
    for which in (2, 0, 3, 1):
        calls[which].end()
        assert notified.next() is works[which]


def test_an_ended_call_calls_back_while_another_runs(mesh: Mesh) -> None:
    notified = Notified()
    (first, second), works = started(mesh, 2)
    works[0].on_done(notified)
    second.end()
    with mesh.changed:  # the thread waits for the next end
        assert mesh.changed.wait_for(lambda: mesh.n_seen == mesh.n_ended == 1, LONG_S)
    works[1].on_done(notified)
    assert notified.next() is works[1]
    first.end()
    assert notified.next() is works[0]


def test_calls_of_one_mesh_do_not_wait_for_another_mesh(mesh: Mesh) -> None:
    notified, other = Notified(), Mesh()
    (first,), (early,) = started(mesh, 1)
    (second,), (late,) = started(other, 1)
    early.on_done(notified)
    late.on_done(notified)
    second.end()
    assert notified.next() is late
    first.end()
    assert notified.next() is early


def test_a_raising_callback_stops_no_other(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    notified = Notified()
    calls, works = started(mesh, 2)
    works[0].on_done(lambda _: 1 / 0)
    works[1].on_done(notified)
    for call in calls:
        call.end()
    assert notified.next() is works[1]
    assert "a callback of a finished call failed" in caplog.text


def test_the_end_of_the_program_waits_for_callbacks(mesh: Mesh) -> None:
    notified, completions = Notified(), type(COMPLETIONS)()
    (call,), (work,) = started(mesh, 1)
    completions.add(work, notified)
    call.end()
    completions.finish()
    assert notified.works == [work]


def test_without_threads_ended_calls_call_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETIONS", type(COMPLETIONS)())
    refuse_threads(monkeypatch)
    notified = Notified()
    (call,), (work,) = started(mesh, 1)
    with pytest.raises(ShoalError, match="shoal-completions"):
        work.on_done(notified)
    call.end()
    assert notified.works == []
    work.on_done(notified)
    assert notified.works == [work]


def test_following_a_call_without_a_thread_waits(caplog: pytest.LogCaptureFixture) -> None:
    notified: list[Any] = []
    work: Any = UnseenWork()
    work.failure = ShoalError("the call failed")
    follow(work, notified.append)
    assert notified == [work]
    assert work.waits == [None]
    assert "could not start the thread shoal-completions" in caplog.text
