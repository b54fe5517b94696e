"""The children of a server, as seen by their parent, and its answers over HTTP."""

import errno
import os
import selectors
import subprocess
import sys
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.rendezvous.listener import run_ready
from shoal.server.http import answer
from shoal.server.views import SILENT_S, Views


class Child:
    """A process that prints some lines and waits for its input to end."""

    def __init__(self, *lines: str) -> None:
        code = f"import sys\nfor line in {lines}: print(line, flush=True)\nsys.stdin.read()"
        self.pipe, out = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        argv = [sys.executable, "-S", "-c", code]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out)
        os.close(out)
        os.set_blocking(self.pipe, False)

    def forget(self) -> None:
        """End it, and act as if the process was waited for elsewhere."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.returncode = 0


def test_the_last_valid_report_of_a_child_is_kept() -> None:
    with selectors.DefaultSelector() as selector:
        views, one = Views(selector), Child('{"view": 1}', '{"view": 2}', "half a", "7")
        views.add(one.process.pid, one.pipe, 7, "job")
        for _ in range(4):
            run_ready(selector, 10.0)
        assert views.reports_of(7) == [{"view": 2, "job": "job", "pid": one.process.pid}]
        assert views.reports_of(8) == []
        views.kill_all()
        one.forget()


def test_the_oldest_view_of_the_same_job_makes_room() -> None:
    with selectors.DefaultSelector() as selector:
        views, children = Views(selector), [Child() for _ in range(4)]
        rails = ((7, "rail 1"), (8, "rail 0"), (7, "rail 0"), (7, "rail 0"))
        for (key, job), one in zip(rails, children, strict=True):
            views.add(one.process.pid, one.pipe, key, job)
        pids = [one.process.pid for one in children]
        views.make_room(7, "rail 0", 2)  # of one rail
        assert [view["pid"] for view in views.reports_of(None)] == [pids[0], pids[1], pids[3]]
        views.make_room(7, None, 2)  # of all views of the key
        assert [view["pid"] for view in views.reports_of(None)] == [pids[1], pids[3]]
        views.kill_all()
        for one in children:
            one.forget()


def test_a_child_that_cannot_be_watched_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with selectors.DefaultSelector() as selector:
        views, one = Views(selector), Child()
        monkeypatch.setattr(os, "pidfd_open", none_left)
        with pytest.raises(OSError, match="Too many"):
            views.add(one.process.pid, one.pipe, 7, "job")
        with pytest.raises(ProcessLookupError):
            os.kill(one.process.pid, 0)
        one.forget()


def test_a_child_that_is_silent_for_long_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    with selectors.DefaultSelector() as selector:
        views, silent, other = Views(selector), Child(), Child('{"view": 1}')
        begun = time.monotonic()
        views.add(silent.process.pid, silent.pipe, 7, "job")
        views.add(other.process.pid, other.pipe, 7, "job")
        deadline = views.next_deadline()
        assert deadline is not None
        assert begun + SILENT_S <= deadline <= time.monotonic() + SILENT_S
        with selectors.DefaultSelector() as spoken:  # not read until it is late
            spoken.register(other.pipe, selectors.EVENT_READ)
            spoken.select()
        views.expire(deadline - 0.001)
        assert views.n == 2
        views.expire(deadline)
        assert [view["pid"] for view in views.reports_of(7)] == [other.process.pid]
        assert "was silent for 10 s" in caplog.text
        views.kill_all()
        for one in (silent, other):
            one.forget()


VIEW: dict[str, Any] = {"n_in_flight": 3, "staging_bytes": 1 << 20, "bytes_in_per_s": 2.5e6}


def state(*views: dict[str, Any], is_draining: bool = False) -> dict[str, Any]:
    return {"is_draining": is_draining, "n_jobs": 2, "views": views}


def ask(path: str, is_draining: bool = False) -> tuple[int, str]:
    now = state(VIEW, VIEW, is_draining=is_draining)
    response = answer(f"GET {path} HTTP/1.1\r\nHost: cpu1\r\n\r\n".encode(), lambda: now)
    assert response is not None
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
        assert response is not None
        assert response.startswith(b"HTTP/1.1 404 ")


def test_metrics_sum_over_all_views_and_name_no_job() -> None:
    status, text = ask("/metrics")
    assert status == 200
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    wanted = {"draining": 0, "jobs": 2, "views": 2, "calls_in_flight": 6, "memory_bytes": 2 << 20}
    wanted |= {"receive_bytes_per_second": 5e6, "send_bytes_per_second": 0}
    found = {one.name: one.value for one in samples}
    assert found == {f"shoal_server_{name}": value for name, value in wanted.items()}
