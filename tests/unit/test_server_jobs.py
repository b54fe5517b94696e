"""Requests that a holder of a key can make of a server, its children, and its answers over HTTP."""

import errno
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from process.serving import Talker
from prometheus_client.parser import text_string_to_metric_families

from shoal.engine import Hello
from shoal.group.pool import protocol
from shoal.group.pool.protocol import Ask, Meet, Message, Reserve, Reserved, Status
from shoal.rendezvous.announcing import own_version
from shoal.rendezvous.listener import run_ready
from shoal.server import child
from shoal.server import server as server_module
from shoal.server.http import answer
from shoal.server.job import Pace
from shoal.server.options import JobKey, listen
from shoal.server.registrar import address_for
from shoal.server.server import Server, as_text
from shoal.server.views import SILENT_S, Views

SECRET = b"k" * 32
KEY = JobKey("", protocol.key_id(SECRET), protocol.server_key(SECRET))
MEET = Meet(1, 3, 3, 4, b"a roster")
PLACE: Any = SimpleNamespace(
    entry=SimpleNamespace(encode=lambda _: b"an entry"), close=int, take=list
)
NOW = 1000.0


class Peer:
    """A connection that keeps its sent messages."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def expect(self, kind: int, most_bytes: int) -> None:
        pass

    def send(self, kind: int, body: bytes) -> bool:
        self.sent.append(protocol.decode(kind, body))
        return True

    def close(self) -> None:
        self.is_open = False


def test_a_key_gets_64_views_at_once_and_then_four_a_second_also_after_a_rest() -> None:
    pace = Pace()
    for now in (NOW, 2 * NOW):
        assert [pace.take(now) for _ in range(66)] == [True] * 64 + [False] * 2
        assert pace.next_at == now + 0.25
        assert not pace.take(now + 0.249)
        assert [pace.take(now + 1.0) for _ in range(5)] == [True] * 4 + [False]


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = Server([], [KEY])
    made._serve = lambda _job, _meet: ""
    yield made
    made._close()


@pytest.fixture
def now(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the server, which the test sets; nothing else has a deadline."""
    now = [100.0]
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server, "_endpoint", SimpleNamespace(deadline=float("inf")))
    return now


def new_job(server: Any, open_place: Callable[[], str] = str) -> Any:
    """Connect a job that has proved the server's key and requested a reservation."""
    server.welcome(Peer(), Hello(KEY.number, 0, 0))
    job = [*server._jobs.values()][-1]
    job.open_place, job.place = open_place, PLACE
    answers_to(server, job, Reserve(own_version(), f"group {len(server._jobs)}", 3))
    return job


def answers_to(server: Any, job: Any, message: Message) -> list[Message]:
    """Send a message to a server, and return its answers."""
    n = len(job.peer.sent)
    server.received(job.peer, *protocol.encode(message), -1)
    return list(job.peer.sent[n:])


def test_views_above_their_keys_rate_wait_and_begin_in_order(server: Any, now: list[float]) -> None:
    began: list[Any] = []
    server._serve = lambda job, meet: (began.append((job, meet.view)), "")[1]
    one, other, gone = (new_job(server) for _ in range(3))
    for view in range(64):
        assert answers_to(server, one, MEET._replace(view=view))
    assert not answers_to(server, one, MEET)
    assert not answers_to(server, gone, MEET)
    server.lost(gone.peer)
    assert not answers_to(server, other, MEET._replace(view=2))
    assert not answers_to(server, one, MEET._replace(view=3))  # in place of the waiting one
    assert server._wake_at() == 100.25
    del began[:]
    for now[0] in (100.25, 100.25, 100.5, 100.75):
        server._serve_waiting()
    assert began == [(one, 3), (other, 2)]
    assert not server._waiting


def test_a_view_given_up_while_it_waited_starts_no_process(server: Any, now: list[float]) -> None:
    began: list[Any] = []
    server._serve = lambda job, _meet: (began.append(job), "")[1]
    jobs = [new_job(server) for _ in range(20)]
    for _ in range(64):
        answers_to(server, jobs[0], MEET)
    for job in jobs[1:]:
        assert not answers_to(server, job, MEET)
    del began[:]
    while server._waiting:
        now[0] = server._wake_at()
        server._serve_waiting()
    assert now == [101.5]
    assert began == jobs[1:6]
    assert all(job.peer.sent[-1] == Reserved("", server._identity, b"an entry") for job in jobs)


def test_a_job_is_served_while_its_next_view_waits_for_a_place(server: Any) -> None:
    lacks = ["", "no port is free", "no port is free", ""]  # the last two at pings

    def open_place() -> str:
        why = lacks.pop(0)
        [*server._jobs.values()][-1].place = None if why else PLACE
        return why

    job = new_job(server, open_place)
    assert answers_to(server, job, MEET) == [Reserved("", server._identity)]
    assert len(answers_to(server, job, Ask())) == 1
    offer, status = answers_to(server, job, Ask())
    assert offer == Reserved("", server._identity, b"an entry")
    assert isinstance(status, Status)
    assert len(answers_to(server, job, Ask())) == 1
    assert not lacks


@pytest.mark.parametrize("is_late", [False, True])
def test_a_job_that_reads_no_answers_is_dropped_and_one_that_is_late_is_not(is_late: bool) -> None:
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server: Any = Server([listener], [KEY])
    server._state = lambda _key: {"views": [], "why": "x" * 59_000}
    with Talker(SECRET) as job:
        job.step_others = lambda: server._endpoint.step(time.monotonic())
        peer = job.connect(port)
        job.run_until(lambda: server._jobs)
        (seen,) = server._jobs
        peer.pause(True)
        n_asked = 0
        while server._jobs and not (is_late and seen.n_queued):
            n_asked += protocol.send(peer, Ask()) is None
            job.step_others()
        assert n_asked < 1000  # of 59 KB each, most of them in the kernel
        if is_late:
            assert time.monotonic() < server._endpoint.deadline < time.monotonic() + 2.0
            peer.pause(False)
            job.run_until(lambda: len(job.messages) == n_asked)
            assert isinstance(job.ask(Ask()), Status)
            assert server._endpoint.deadline == float("inf")
        else:
            assert not seen.is_open
    server._close()


def test_an_answer_about_too_many_views_is_cut_to_valid_json() -> None:
    head = {"version": "1", "n_jobs": 8}
    few, many = ([{"view": at, "why": "é" * 100} for at in range(n)] for n in (3, 256))
    assert json.loads(as_text({**head, "views": few})) == {**head, "views": few}
    text = as_text({**head, "views": many})
    assert len(text) <= 60_000
    found = json.loads(text)
    assert found["views"] == many[: len(found["views"])]
    assert len(found["views"]) > 80  # each takes 626 to 630 bytes
    assert protocol.encode(Status(text))


def test_a_child_is_forked_with_signals_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[Sequence[int]] = []

    def fork() -> int:
        blocked.append(list(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        return 1

    monkeypatch.setattr(os, "fork", fork)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pid, pipe = child.start(MEET, "", 0, [])
    os.close(pipe)
    assert pid == 1
    assert {signal.SIGTERM, signal.SIGINT} <= set(blocked[0])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_server_registers_at_one_in_reach() -> None:
    for local, listening, address in (
        ("10.0.0.2", [("10.0.0.2", 7)], ("10.0.0.2", 7)),
        ("10.0.0.2", [("fe80::1", 7), ("10.0.0.2", 8)], ("10.0.0.2", 8)),
        ("10.0.0.2", [("0.0.0.0", 7)], ("10.0.0.2", 7)),
        ("192.168.0.1", [("10.0.0.2", 7)], ("10.0.0.2", 7)),  # the store is on another network
    ):
        assert address_for(SimpleNamespace(local_host=local), listening) == address


def test_a_key_reserves_only_groups_with_room_for_two_views_each(server: Any) -> None:
    """Otherwise each new view would end another job's oldest, which that requests again."""
    jobs = [new_job(server) for _ in range(130)]
    reserved: list[Any] = [job.peer.sent[0] for job in jobs]
    assert [not answer.refused for answer in reserved] == [True] * 128 + [False] * 2
    assert "128 groups of jobs with this key" in reserved[-1].refused
    (again,) = answers_to(server, jobs[0], Reserve(own_version(), "group 0", 3))
    assert again == reserved[0]


@pytest.mark.parametrize(("bound", "most"), [(-1, 576 << 20), (1 << 40, 576 << 20), (99, 99)])
def test_a_view_has_a_memory_limit(bound: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {child.resource.RLIMIT_DATA: (bound, bound)}
    monkeypatch.setattr(child.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(child.resource, "setrlimit", limits.__setitem__)
    child._limit(64 << 20)
    assert limits == {child.resource.RLIMIT_DATA: (most, most)}


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
    one, none_left = Child(), OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=none_left))
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
