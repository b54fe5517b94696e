"""A server's answers over HTTP, without I/O."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shoal.server.http import answer

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
