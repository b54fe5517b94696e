"""The screens of `shoal top`: of this host, and of ranks that answer over a network or do not."""

import argparse
import contextlib
import functools
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.cli import main
from shoal.cli.top import _reader as reader_of
from shoal.errors import PeerLost, ShoalError
from shoal.group import form as forming
from shoal.rendezvous.interface import Advertised
from shoal.rendezvous.listener import hold_port, listen_tcp
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.state import remote
from shoal.state.prometheus import text_of
from shoal.state.remote import Answering, Place, ask
from shoal.state.stats import stats_of
from shoal.state.tally import Tally

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


CALL = {"group": None, "what": "barrier", "n_bytes": 0, "age_s": 1.5, "waits": []}


def document(rank: Any, *monitors: list[Any], **changed: Any) -> bytes:
    found = {"shoal_monitor": 1, "world": "w", "name": "", "host": "h", "slurm_job_id": "unknown"}
    found |= {"rank": rank, "size": 3, "n_hosts": 2, "pid": 77, "n_calls": 4, "is_readable": True}
    found |= {"taken_at_s": 1.8e9, "counted_s": 2, "busy_s": 0.5, "busy_share": None}
    found |= {"in_flight": [], "ended": {"barrier": [3, 0]}, "links": [], "stalls": {"data": 1}}
    return json.dumps({**found, "monitors": monitors, **changed}).encode()


@contextlib.contextmanager
def answering(read: Callable[[], bytes], kind: type[Answering] = Answering) -> Iterator[int]:
    """Make a process answer; yield its port of 127.0.0.1."""
    listener = listen_tcp("127.0.0.1", (0,))
    port = listener.getsockname()[1]
    serving = kind(listener, KEY, read)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield port
    finally:
        serving.submit(None)
        thread.join(10)
        assert not thread.is_alive()


def at(port: int, rank: int = 0) -> Place:
    return Place("w", rank, "h", "127.0.0.1", port)


def errors_of(*places: Place, key: bytes = KEY) -> list[str | None]:
    return [one.get("error") for one in ask(places, key)]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KEY", KEY.decode())
    monkeypatch.delenv("SHOAL_KEY_FILE", raising=False)


def test_a_rank_names_all_of_its_world_and_each_answers(capsys: pytest.CaptureFixture[str]) -> None:
    monitors: list[list[Any]] = []
    with (
        answering(lambda: document(0, *monitors)) as first,
        answering(lambda: document(1, *monitors)) as second,
    ):
        monitors += [[1, "b", "127.0.0.1", second], [0, "a", "127.0.0.1", first], [2, "c", "::", 0]]
        assert main(["top", f"localhost:{second}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert [one.get("error") for one in found[:2]] == [None, None]
    assert found[2]["error"] == "it was started without SHOAL_MONITOR=1, or without a job key"
    assert found[2]["host"] == "c"


def test_a_long_document_is_sent_in_parts() -> None:
    more = "".join(map(str, range(50_000)))
    with answering(lambda: document(0, name=more)) as port:
        [found] = ask([at(port)], KEY)
    assert found["name"] == more


def test_another_key_gets_no_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with answering(lambda: document(0)) as port:
        for _ in range(2):
            [error] = errors_of(at(port), key=OTHER_KEY)
            assert "holds another key" in str(error)
        assert errors_of(at(port)) == [None]
    assert caplog.text.count("`shoal top` with another job key asked for numbers") == 1


def test_ranks_that_do_not_answer_are_shown_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.5)
    n_silent = remote.MOST_ASKED + 6
    with contextlib.closing(listen_tcp("127.0.0.1", (0,))) as silent:
        port = silent.getsockname()[1]
        with answering(lambda: document(n_silent)) as alive:
            places = [*(at(port, rank) for rank in range(n_silent)), at(alive, n_silent)]
            assert errors_of(*places) == [*(["it does not answer"] * n_silent), None]


def test_a_slow_rank_has_five_seconds_for_its_full_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Answering):
        def _get(self, peer: Any, key: str, wait_ms: int) -> None:
            ended.wait(0.05)  # a short time for each of a thousand parts
            super()._get(peer, key, wait_ms)

    assert remote._ANSWER_S == 5
    monkeypatch.setattr(remote, "_ANSWER_S", 1.5)
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    ended = threading.Event()
    with answering(lambda: b" " * remote.MOST_BYTES, Slow) as port:
        begin_s = time.monotonic()
        assert errors_of(at(port)) == ["it does not answer"]
        assert time.monotonic() - begin_s < 10  # all parts together take 50 s
        ended.set()


def test_top_switches_worlds_only_if_no_rank_of_the_shown_one_answers() -> None:
    monitors: list[list[Any]] = []
    worlds = ["w", "w"]
    with (
        answering(lambda: document(0, *monitors, world=worlds[0])) as first,
        answering(lambda: document(1, *monitors, world=worlds[1])) as second,
    ):
        monitors += [[0, "a", "127.0.0.1", first], [1, "b", "127.0.0.1", second]]
        read = reader_of(argparse.Namespace(address=f"127.0.0.1:{second}"))
        assert [found["world"] for found in read()] == ["w", "w"]
        worlds[1] = "another"
        monitors[:] = [[1, "b", "127.0.0.1", second]]
        assert [(found["rank"], found["world"]) for found in read()] == [(0, "w"), (1, "another")]
        worlds[0] = "another"
        assert [(found["rank"], found["world"]) for found in read()] == [(1, "another")]


def test_an_ended_rank_and_a_missing_port_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with hold_port() as held:  # no listener
        gone = held.getsockname()[1]
        assert errors_of(at(gone)) == ["it has ended, or its connection broke"]
        assert main(["top", f"127.0.0.1:{gone}", "--once"]) != 0
    assert f"the process at 127.0.0.1:{gone}: it has ended" in capsys.readouterr().err


UNREADABLE = [b"", b"[1]", b"[" * 100_000, document(0, name="1" * remote.MOST_BYTES)]
UNREADABLE += map(document, ("0", float("inf"), True))
UNREADABLE += [document(0, world=["w"]), document(0, links=[{"bytes_in": [-math.inf]}])]
UNREADABLE += [document(0, counted_s=float("nan")), document(0, n_calls=10**400)]
UNREADABLE.append(document(0, pid=functools.reduce(lambda v, _: [v], range(99), 1)))
# A monitor is a rank, a host, an address and a port.
MONITORS = [["x", "h", "::", 1], [0, "h"], [0, "h", "a.name", 1], [0, "h", "::1", 65536]]
UNREADABLE += [document(0, monitor) for monitor in (*MONITORS, [0, "h", "::1", -1])]
UNREADABLE.append(document(0, [0, "h", "::1", 1], [0, "h", "::1", 2]))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b'{"shoal_monitor": 99}', "it runs another version of shoal"),
        (document(7), "rank 7 answers in its place"),
        *((answer, "its numbers cannot be read") for answer in UNREADABLE),
    ],
)
def test_an_invalid_answer_is_an_error_of_its_rank(answer: bytes, why: str) -> None:
    with answering(lambda: answer) as port:
        assert errors_of(at(port)) == [why]


@pytest.mark.parametrize(
    "changed",
    [
        {"n_calls": "4\nshoal_calls_total 5", "in_flight": None},
        *({"counted_s": "1"}, {"stalls": []}, {"links": {"a": 1}}, {"in_flight": {"a": 1}}),
        *({"in_flight": [call]} for call in ({"what": "barrier"}, CALL | {"waits": [1]})),
    ],
)
def test_a_rank_with_invalid_numbers_is_shown_as_such_and_has_no_metrics(
    changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monitors: list[list[Any]] = []
    with answering(lambda: document(0, *monitors, **changed)) as port:
        monitors.append([0, "a", "127.0.0.1", port])
        for how in ("--once", "--prometheus"):
            assert main(["top", f"127.0.0.1:{port}", how]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["rank 0 on h: its numbers cannot be read"]


@pytest.mark.parametrize("how", ["--once", "--prometheus", "--json"])
def test_answers_cannot_control_the_terminal(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[2J\r\x9b"
    call = CALL | {"what": bad, "group": bad}
    monitors = [[0, bad, "127.0.0.1", 1]]
    answer = {"host": bad, "slurm_job_id": bad, "stalls": {bad: 1}, "ended": {bad: [1, 1]}}
    answer["error"] = "\x1b[3J"  # which a rank does not send
    with answering(lambda: document(0, *monitors, in_flight=[call], **answer)) as port:
        monitors[0][3] = port
        assert main(["top", f"127.0.0.1:{port}", how]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "[2J" in shown.out
    assert "[3J" not in shown.out
    assert all(char.isprintable() for char in shown.out.replace("\n", ""))


def test_stopped_readers_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_READER_S", 1.0)
    with answering(lambda: document(0)) as port, contextlib.ExitStack() as stopped:
        for _ in range(remote._MOST_READERS):
            client = TcpStoreClient("127.0.0.1", port, timeout_s=30, key=KEY)
            stopped.enter_context(contextlib.closing(client))
            assert client.try_get("n_parts") == b"1"
        end = time.monotonic() + 30
        while errors_of(at(port)) != [None]:
            assert time.monotonic() < end


def test_a_reader_can_only_read_the_document() -> None:
    with answering(lambda: document(0)) as port:

        def client() -> contextlib.closing[TcpStoreClient]:
            return contextlib.closing(TcpStoreClient("127.0.0.1", port, timeout_s=30, key=KEY))

        with client() as one, pytest.raises(PeerLost):
            one.set("n_parts", b"9")
        with client() as one, pytest.raises(PeerLost):
            one.try_get("another key")
        with client() as one:
            assert one.try_get("0") == b""  # no request was made before
            assert one.try_get("n_parts") == b"1"
            assert one.try_get("0") == document(0)
            assert one.try_get("1") == b""


def test_a_rank_listens_at_the_last_port_until_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MONITOR", "1")
    monkeypatch.setattr(forming, "choose_addresses", lambda *_args: [advertised])
    advertised = Advertised("127.0.0.2", "lo", "a test")
    # Below the ports of outgoing connections: the kernel could give the next port to one of them.
    ports = range(random.randrange(14_000, 18_000), 18_900)
    with contextlib.closing(listen_tcp("127.0.0.2", ports)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("SHOAL_PORT_RANGE", f"{port}-{port + 1}")
        listener, place = forming._listen_to_readers(advertised, 1)
        assert place[:2] == listener.getsockname() == ("127.0.0.2", port + 1)
        assert forming._listen_to_readers(advertised, 1) == (None, None)  # no port is left
        monkeypatch.setattr(forming, "_listen_to_readers", lambda *_how: (listener, place))
        monkeypatch.setattr(forming, "meet", Mock(side_effect=ShoalError("no memory")))
        with pytest.raises(ShoalError, match="no memory"):
            forming.form(SimpleNamespace(host=None), 0, 2)  # type: ignore[arg-type]
        assert listener.fileno() == -1


def test_each_rank_of_a_host_gets_a_port_for_readers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_PORT_RANGE", "29600-29602")
    for size, local_size in ((2, ""), (8, "2")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
        found = forming._listen_to_readers(Advertised("127.0.0.1", "lo", "a test"), size)
        assert found == (None, None)
        assert "SHOAL_PORT_RANGE has 3 ports; `shoal top` needs 4" in caplog.text
        caplog.clear()


DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"

LINK = {"rank": 1, "host": "b", "address": "10.0.0.2", "kind": "tcp", "state": "alive"}
LINK |= {"n_paths_lost": 1, "rtt_us": 1500.0, "n_retransmits": 3}
LINK |= {"bytes_out": 2048, "bytes_in": 4096, "bytes_out_per_s": 1024.0, "bytes_in_per_s": 0.0}
WAIT = {"rank": 1, "host": "b", "why": "no data", "since_s": 2.0, "in_call": False}
BARRIER = {"group": "world", "what": "barrier", "n_bytes": 1, "age_s": 2.5, "waits": [WAIT]}


def answer(counted_s: float, busy_s: float) -> dict[str, Any]:
    shown = {"in_flight": [BARRIER], "links": [LINK], "stalls": {"no_grant": 2}, "n_calls": 9}
    times = {"counted_s": counted_s, "busy_s": busy_s, "ended": {"barrier": (8, 8)}}
    return json.loads(document(0, size=2, pid=7, **shown, **times))


def test_each_screen_counts_from_the_previous_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [[answer(10.0, 2.0)], [answer(12.0, 3.0)]]
    monkeypatch.setattr("shoal.state.monitor.read_all", lambda: answers.pop(0))

    def pause(_seconds: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    assert main(["top"]) == 130
    shown = capsys.readouterr().out
    shares = [line for line in shown.splitlines() if line.startswith("rank 0, process 7: ")]
    numbers = "of the time in calls, 1 of 9 in flight; out 1 KiB/s, in 0 B/s"
    assert shares == [f"rank 0, process 7: {share}% {numbers}" for share in (20, 50)]
    for fact in ("round trip 1.5 ms, 3 retransmitted, 1 path lost", "stalls: 2 no_grant"):
        assert fact in shown


def test_a_process_in_two_worlds_counts_as_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = [(77, "world"), (77, "with servers"), (78, "world")]
    found = [json.loads(document(0, pid=pid, world=world)) for pid, world in worlds]
    monkeypatch.setattr("shoal.state.monitor.read_all", lambda: found)
    assert main(["top", "--once"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(": 2 ranks here")
    assert sum(line.startswith("rank 0, process 77: ") for line in lines) == 2


def test_links_that_a_thread_holds_are_not_waited_for() -> None:
    patience: list[float] = []
    tally = Tally()
    mesh = SimpleNamespace(state=patience.append)  # returns None
    what = {"mesh": mesh, "names": [SimpleNamespace(host="a", host_id="1")] * 2}
    stats = stats_of(SimpleNamespace(**what, epoch=255, rank=1, groups=(), count=lambda: tally))
    assert patience == [0.25]
    assert (stats.world, stats.rank, stats.size, stats.n_hosts) == ("00000000000000ff", 1, 2, 1)
    assert (stats.is_readable, stats.in_flight, stats.links, stats.stalls) == (False, (), (), {})


def test_the_dashboard_shows_every_metric_by_its_labels() -> None:
    families = text_string_to_metric_families(text_of([answer(10.0, 2.0)]))
    labels = {one.name: set(one.labels) for family in families for one in family.samples}
    dashboard = json.loads(DASHBOARD.read_text())
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    used = set()
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"shoal_\w+", target["expr"])
            used |= {*names}
            asked = re.findall(r"(\w+)=~?\"", target["expr"])
            asked += re.findall(r"{{(\w+)}}", target["legendFormat"])
            by = re.findall(r"by \(([^)]*)\)", target["expr"])
            asked += [label for some in by for label in some.split(", ")]
            assert all({*asked} <= labels[name] for name in names), target
    assert used == {*labels}
    for one in variables[1:]:
        name, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", one["query"]).groups()
        assert label in labels[name]
        assert one["name"] == label
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len({*cells}) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
