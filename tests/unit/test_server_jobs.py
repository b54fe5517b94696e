"""What a job that holds a key can ask of a server, and how fast."""

import json
import os
import selectors
import signal
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.group.pool.protocol import (
    Ask,
    Meet,
    Message,
    Note,
    Reserve,
    Reserved,
    Status,
    encode,
    own_version,
)
from shoal.group.pool.view_mesh import MEETING_S
from shoal.rendezvous.listener import run_ready
from shoal.server import child
from shoal.server.client import JobConnection, Missed
from shoal.server.options import JobKey
from shoal.server.pace import AT_ONCE_OF_KEY, Pace
from shoal.server.registrar import address_for
from shoal.server.server import Server, as_text

KEY = JobKey("", 7, bytes(32))
MEET = Meet(1, 3, 3, 4, b"a roster")


class Job:
    """One that is connected, and what it was asked."""

    def __init__(self, reply: Message, pace: Pace | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self.sock = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
        for end in (self.sock, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setblocking(False)
        self.asked: list[Message | Missed] = []
        self.has_ended = False
        self._reply = reply
        self.connection = JobConnection(
            self.selector, other, KEY, pace or Pace(), self._answer, self._end
        )

    def close(self) -> None:
        self.connection.connection.close()
        self.selector.close()
        self.sock.close()

    def _answer(self, _job: JobConnection, message: Message | Missed) -> Message:
        self.asked.append(message)
        return self._reply

    def _end(self, _job: JobConnection) -> None:
        self.has_ended = True


def ask_until_full(job: Job) -> None:
    """Ask until no more goes into the socket."""
    try:
        while len(job.asked) < 20_000:
            job.sock.send(encode(Ask()))
            run_ready(job.selector, 0.0)
    except BlockingIOError:
        pass


def test_who_takes_no_answers_is_read_no_further_and_given_up() -> None:
    job = Job(Status("x" * 60_000))
    ask_until_full(job)
    assert len(job.asked) < 10_000
    assert job.connection.connection.deadline is not None
    job.close()
    assert job.has_ended


def test_who_took_its_answers_late_is_not_given_up() -> None:
    job = Job(Status("x" * 60_000))
    while job.connection.connection.deadline is None:
        job.sock.send(encode(Ask()))
        run_ready(job.selector, 0.0)
    while job.connection.connection.deadline is not None:
        job.sock.recv(1 << 20)
        run_ready(job.selector, 1.0)
    n = len(job.asked)
    job.sock.send(encode(Ask()))
    run_ready(job.selector, 1.0)
    assert len(job.asked) == n + 1
    job.close()


def test_views_rest_until_it_is_their_turn_and_then_come_in_their_order() -> None:
    job = Job(Reserved("", bytes(16)))
    later = [MEET._replace(view=view) for view in (2, 3)]
    job.sock.send(16 * encode(MEET) + b"".join(map(encode, later)))
    run_ready(job.selector, 1.0)
    assert job.asked == 16 * [MEET]
    for view in later:
        at = job.connection.rests_until
        assert at is not None
        job.connection.go_on(at - 0.001)
        assert view not in job.asked
        job.connection.go_on(at)
        assert job.asked[-1] == view
    assert job.asked == [*(16 * [MEET]), *later]
    assert job.connection.rests_until is None
    job.close()


def test_a_job_whose_view_rests_hears_that_the_server_lives() -> None:
    job = Job(Reserved("", bytes(16)))
    job.sock.send(17 * encode(MEET) + encode(Ask()))
    run_ready(job.selector, 1.0)
    assert job.asked == [*(16 * [MEET]), Ask()]
    job.sock.send(encode(Ask()))
    run_ready(job.selector, 1.0)
    assert job.asked == [*(16 * [MEET]), Ask(), Ask()]
    assert job.connection.rests_until is not None
    job.close()


def test_no_more_is_read_of_a_job_of_which_several_views_rest() -> None:
    job = Job(Reserved("", bytes(16)))
    job.sock.send(18 * encode(MEET))
    run_ready(job.selector, 1.0)
    job.sock.send(encode(Ask()))
    run_ready(job.selector, 0.0)
    assert job.asked == 16 * [MEET]
    for _ in range(2):
        at = job.connection.rests_until
        assert at is not None
        job.connection.go_on(at)
    run_ready(job.selector, 1.0)
    assert job.asked == [*(18 * [MEET]), Ask()]
    job.close()


def test_sixteen_rails_that_restart_twice_at_once_wait_for_nothing() -> None:
    paces = Pace(AT_ONCE_OF_KEY)
    for _ in range(3):  # the first start, and two more
        rails = [Job(Reserved("", bytes(16)), paces) for _ in range(16)]
        for job in rails:
            job.sock.send(encode(MEET))
            run_ready(job.selector, 1.0)
            assert job.asked == [MEET]
            job.close()


def test_one_connection_cannot_take_what_all_rails_have() -> None:
    paces = Pace(AT_ONCE_OF_KEY)
    one, other = (Job(Reserved("", bytes(16)), paces) for _ in range(2))
    one.sock.send(17 * encode(MEET))
    run_ready(one.selector, 1.0)
    assert one.asked == 16 * [MEET]
    other.sock.send(encode(MEET))
    run_ready(other.selector, 1.0)
    assert other.asked == [MEET]
    one.close()
    other.close()


def test_a_view_that_has_rested_longer_than_its_workers_wait_gets_no_process() -> None:
    job = Job(Reserved("", bytes(16)))
    job.sock.send(16 * encode(MEET) + encode(MEET._replace(view=2)))
    run_ready(job.selector, 1.0)
    at = job.connection.rests_until
    assert at is not None
    job.connection.go_on(at + MEETING_S + 0.1)
    assert job.asked == [*(16 * [MEET]), Missed()]
    job.close()


def test_a_job_whose_view_got_no_process_gets_the_entry_that_it_has_not_used() -> None:
    server: Any = Server([], [KEY])
    job: Any = SimpleNamespace(key=KEY, job="a job", entry=b"an entry")
    answer = server._answer(job, Missed())
    server._close()
    assert answer == Reserved("", server._identity, b"an entry")


def test_a_job_is_served_though_its_next_view_has_no_place_yet_and_gets_that_later() -> None:
    server: Any = Server([], [KEY])
    server._begin = lambda _job, _meet: ""
    sent: list[bytes] = []
    lacks = ["no port is free", "no port is free", ""]  # at the view, at one ping and at the next
    job: Any = SimpleNamespace(key=KEY, job="a job", place=None, entry=b"", notes=())
    job.connection = SimpleNamespace(send=sent.append)

    def open_place() -> str:
        why = lacks.pop(0)
        if not why:
            job.place, job.entry = "a place", b"an entry"
        return why

    job.open_place = open_place
    served = server._answer(job, MEET)
    for _ in range(3):
        assert isinstance(server._answer(job, Ask()), Status)
    server._close()
    assert served == Reserved("", server._identity)
    assert sent == [encode(Reserved("", server._identity, b"an entry"))]
    assert not lacks


def test_a_pace_that_was_not_used_is_no_more_than_so_many_at_once() -> None:
    pace = Pace()
    assert [pace.take(1000.0) for _ in range(16)] == [None] * 16
    due = pace.take(1000.0)
    assert due is not None
    assert due == pytest.approx(1000.25)
    assert pace.take(due) is None
    assert pace.take(due) == pytest.approx(1000.5)
    assert [pace.take(2000.0) for _ in range(17)][:16] == [None] * 16


def test_of_each_kind_of_call_the_last_word_counts_and_few_are_kept() -> None:
    job = Job(Reserved("", bytes(16)))
    for number in range(20):
        job.connection.note(Note(1, f"kind {number % 9}", f"{number}"))
    told = [(note.kind, note.how) for note in job.connection.notes]
    assert told == [(f"kind {number % 9}", f"{number}") for number in range(12, 20)]
    job.close()


def test_an_answer_about_more_views_than_it_holds_is_whole_and_short() -> None:
    told = {"version": "1", "calls": ["é" * 100] * 8}
    few, many = ([{"view": at, "why": "é" * 100} for at in range(n)] for n in (3, 256))
    assert json.loads(as_text({**told, "views": few})) == {**told, "views": few}
    text = as_text({**told, "views": many})
    assert len(text) <= 60_000
    found = json.loads(text)
    assert found["views"] == many[: len(found["views"])]
    assert len(found["views"]) > 80  # each takes 626 to 630 bytes
    assert encode(Status(text))


def test_a_child_is_forked_while_nobody_can_ask_it_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("local", "listening", "address"),
    [
        ("10.0.0.2", [("10.0.0.2", 7)], ("10.0.0.2", 7)),
        ("10.0.0.2", [("fe80::1", 7), ("10.0.0.2", 8)], ("10.0.0.2", 8)),
        ("10.0.0.2", [("0.0.0.0", 7)], ("10.0.0.2", 7)),
        ("192.168.0.1", [("10.0.0.2", 7)], ("10.0.0.2", 7)),  # the store is on another network
    ],
)
def test_a_server_registers_where_the_store_would_reach_it(
    local: str, listening: list[tuple[str, int]], address: tuple[str, int]
) -> None:
    client: Any = SimpleNamespace(local_host=local)
    assert address_for(client, listening) == address


def test_of_one_key_no_more_are_taken_than_have_room_for_two_views_each() -> None:
    """Or each new view would end the oldest of another, which asks for it again."""
    server: Any = Server([], [KEY])
    jobs: list[Any] = [
        SimpleNamespace(key=KEY, job=None, entry=b"", open_place=str) for _ in range(130)
    ]
    server._jobs = jobs
    reserved = []
    for number, job in enumerate(jobs):
        answer: Any = server._answer(job, Reserve(own_version(), f"group {number}", 3))
        reserved.append(not answer.refused)
    again: Any = server._answer(jobs[0], Reserve(own_version(), "group 0", 3))
    server._jobs = set()
    server._close()
    assert reserved == [True] * 128 + [False] * 2
    assert "128 groups of jobs with this key" in answer.refused
    assert not again.refused


@pytest.mark.parametrize(("bound", "most"), [(-1, 576 << 20), (1 << 40, 576 << 20), (99, 99)])
def test_a_view_has_its_memory_and_no_more_than_whoever_started_the_server(
    bound: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {child.resource.RLIMIT_DATA: (bound, bound)}
    monkeypatch.setattr(child.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(child.resource, "setrlimit", limits.__setitem__)
    child._limit(64 << 20)
    assert limits == {child.resource.RLIMIT_DATA: (most, most)}
