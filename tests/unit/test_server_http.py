"""What a server answers over HTTP, without any I/O."""

import sys
from typing import Any

import pytest

from shoal.server.http import Health, answer

VIEW: dict[str, Any] = {"n_in_flight": 3, "staging_bytes": 1 << 20, "bytes_in_per_s": 2.5e6}


def ask(path: str, health: Health = Health(False, 2, [VIEW, VIEW])) -> tuple[int, str]:  # noqa: B008
    response = answer(f"GET {path} HTTP/1.1\r\nHost: cpu1\r\n\r\n".encode(), lambda: health)
    assert response is not None
    head, _, body = response.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body.decode()


def test_a_server_that_runs_is_healthy_and_one_that_drains_is_not_ready() -> None:
    draining = Health(True, 0, [])
    assert ask("/healthz") == (200, "ok\n")
    assert ask("/healthz", draining) == (200, "ok\n")
    assert ask("/readyz?verbose") == (200, "ready\n")
    assert ask("/readyz", draining) == (503, "draining\n")
    assert ask("/")[0] == 404


def test_a_request_that_is_not_complete_is_waited_for_and_one_that_never_ends_is_not() -> None:
    assert answer(b"GET /healthz HTTP/1.1\r\n", lambda: Health(False, 0, [])) is None
    endless = answer(b"GET /" + bytes(4096), lambda: Health(False, 0, []))
    assert endless is not None
    assert endless.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "request_line", [b"GET", b"HEAD / x y", b"GET \xff\x00 HTTP", b"", b"GET  "]
)
def test_nonsense_is_answered_like_any_other_page_that_there_is_not(request_line: bytes) -> None:
    response = answer(request_line + b"\r\n\r\n", lambda: Health(False, 0, []))
    assert response is not None
    assert response.startswith(b"HTTP/1.1 404 ")


def test_metrics_without_the_library_say_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert ask("/metrics") == (
        501,
        "metrics need prometheus_client: pip install prometheus_client\n",
    )


def test_metrics_count_all_views_together_and_name_no_job() -> None:
    pytest.importorskip("prometheus_client")
    status, text = ask("/metrics")
    assert status == 200
    assert "shoal_server_jobs 2.0" in text
    assert "shoal_server_views 2.0" in text
    assert "shoal_server_calls_in_flight 6.0" in text
    assert "shoal_server_receive_bytes_per_second 5e+06" in text
