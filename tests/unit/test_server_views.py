"""The children of a server, as seen by their parent, and its answers over HTTP."""

import errno
import os
import selectors
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.rendezvous.listener import run_ready
from shoal.server.http import answer
from shoal.server.views import SILENT_S, Views


class Child:
    """A process that prints some lines and then waits for its end."""

    def __init__(self, *lines: str) -> None:
        code = f"import signal\nfor line in {lines}: print(line, flush=True)\nsignal.pause()"
        self.pipe, out = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        argv, to = [sys.executable, "-S", "-c", code], [(os.POSIX_SPAWN_DUP2, out, 1)]
        self.pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=to)
        os.close(out)
        os.set_blocking(self.pipe, False)


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def views(selector: selectors.BaseSelector) -> Iterator[Views]:
    made = Views(selector)
    yield made
    made.kill_all()


def test_the_last_valid_report_of_a_child_is_kept(selector: Any, views: Views) -> None:
    one = Child('{"view": 1}', '{"view": 2}', "half a", "7")
    views.add(one.pid, one.pipe, 7, "job")
    for _ in range(4):
        run_ready(selector, 10.0)
    assert views.reports_of(7) == [{"view": 2, "job": "job", "pid": one.pid}]
    assert views.reports_of(8) == []


def test_the_oldest_view_of_the_same_job_makes_room(views: Views) -> None:
    pids = []
    for key, job in ((7, "rail 1"), (8, "rail 0"), (7, "rail 0"), (7, "rail 0")):
        one = Child()
        views.add(one.pid, one.pipe, key, job)
        pids.append(one.pid)
    views.make_room(7, "rail 0", 2)  # of one rail
    assert [view["pid"] for view in views.reports_of(None)] == [pids[0], pids[1], pids[3]]
    views.make_room(7, None, 2)  # of all views of the key
    assert [view["pid"] for view in views.reports_of(None)] == [pids[1], pids[3]]


def test_a_child_that_cannot_be_watched_is_killed(
    views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    one = Child()
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many"):
        views.add(one.pid, one.pipe, 7, "job")
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


def test_a_child_that_is_silent_for_long_is_killed(
    views: Views, caplog: pytest.LogCaptureFixture
) -> None:
    silent, other = Child(), Child('{"view": 1}')
    begun = time.monotonic()
    for one in (silent, other):
        views.add(one.pid, one.pipe, 7, "job")
    deadline = views.next_deadline()
    assert begun + SILENT_S <= deadline <= time.monotonic() + SILENT_S
    with selectors.DefaultSelector() as spoken:  # not read until it is late
        spoken.register(other.pipe, selectors.EVENT_READ)
        spoken.select()
    views.expire(deadline - 0.001)
    assert views.n == 2
    views.expire(deadline)
    assert [view["pid"] for view in views.reports_of(7)] == [other.pid]
    assert "was silent for 10 s" in caplog.text


VIEW: dict[str, Any] = {"n_in_flight": 3, "staging_bytes": 1 << 20, "bytes_in_per_s": 2.5e6}


def state(*views: dict[str, Any], is_draining: bool = False) -> dict[str, Any]:
    return {"is_draining": is_draining, "n_jobs": 2, "views": views}


def ask(path: str, is_draining: bool = False) -> tuple[int, str]:
    now = state(VIEW, VIEW, is_draining=is_draining)
    response = answer(f"GET {path} HTTP/1.1\r\nHost: cpu1\r\n\r\n".encode(), lambda: now)
    head, _, body = response.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body.decode()


def test_a_running_server_is_healthy_and_a_draining_one_is_not_ready() -> None:
    assert ask("/healthz") == (200, "ok\n")
    assert ask("/healthz", is_draining=True) == (200, "ok\n")
    assert ask("/readyz?verbose") == (200, "ready\n")
    assert ask("/readyz", is_draining=True) == (503, "draining\n")
    assert ask("/")[0] == 404


def test_garbage_is_answered_like_an_unknown_page() -> None:
    for request_line in (b"GET", b"HEAD / x y", b"GET \xff\x00 HTTP", b"", b"GET  "):
        response = answer(request_line + b"\r\n\r\n", state)
        assert response.startswith(b"HTTP/1.1 404 ")


def test_metrics_sum_over_all_views_and_name_no_job() -> None:
    status, text = ask("/metrics")
    assert status == 200
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    wanted = {
        "draining": 0,
        "jobs": 2,
        "views": 2,
        "calls_in_flight": 6,
        "memory_bytes": 2 << 20,
        "receive_bytes_per_second": 5e6,
        "send_bytes_per_second": 0,
    }
    found = {one.name: one.value for one in samples}
    assert found == {f"shoal_server_{name}": value for name, value in wanted.items()}
