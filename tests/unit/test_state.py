"""State dumps of ranks: as text, in files, and as the joint report of many ranks."""

import json
import logging
import os
import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shoal import UsageError
from shoal.cli import main
from shoal.state import AtDeadline, document, heed_settings, watch
from shoal.state.culprit import verdict
from shoal.state.document import WORDS, waits_of
from shoal.state.files import check_folder, pattern_of_job, stem_of, write
from shoal.state.late import late_in
from shoal.state.text import text_of

WHAT = "all_reduce float32[1024] sum by ring"
CALL = """{"serial": 5, "n_bytes": 4096, "age_s": 12.3, "left_s": 4.0, "awaits_message": false,
    "scratch": "none", "scratch_bytes": 0, "n_steps": 7, "n_steps_left_out": 0}"""
PEER = """{"state": "alive", "link": "tcp", "since_received_s": 0.2, "since_sent_s": 0.1,
    "n_queued": 2, "queued_bytes": 2048, "n_frames_out": 3, "n_frames_in": 4,
    "n_bytes_out": 1048576, "n_bytes_in": 0, "bytes_out_per_s": 1024.0, "bytes_in_per_s": 0.0,
    "stalls": {"no_grant": 7, "no_slot": 0, "no_credit": 0, "no_staging": 0, "link_full": 1},
    "paths": [
        {"state": "open", "is_lost": false, "lost_s": null, "why_lost": "", "n_reconnects": 0},
        {"state": "lost", "is_lost": true, "lost_s": 2.5, "why_lost": "was cut", "n_reconnects": 3},
        {"state": "unmade", "is_lost": false, "lost_s": null, "why_lost": "", "n_reconnects": 0},
        {"state": "dialled", "is_lost": false, "lost_s": 0.5, "why_lost": "", "n_reconnects": 0},
        {"state": "ended", "is_lost": false, "lost_s": null, "why_lost": "", "n_reconnects": 0}],
    "sockets": [{"rtt_us": 1500, "rtt_var_us": 10, "congestion_window": 12, "n_unacked": 3,
        "n_retransmits": 8, "unsent_bytes": 512}]}"""
GROUP = """{"id": "0000000000000007", "name": "world", "is_made": true, "made_by_others": [],
    "ended": null, "n_in_flight_left_out": 0, "finished": [{"key": "1", "what": "barrier"}]}"""
WORLD = """{"epoch": "e", "is_closed": false, "is_stuck": false, "scratch_bytes": 0,
    "staging": {"used_bytes": 9, "reserved_bytes": 9, "peak_bytes": 9, "ceiling_bytes": 4096}}"""
STATE = """{"shoal_dump": 1, "why": "it was asked for", "taken_at": "now", "fold_isa": "avx2",
    "versions": {"shoal": "1"}, "settings": {"SHOAL_ALGO": "ring"}, "wakeups": {"late": 0},
    "threads": [{"name": "MainThread", "stack": ["train.py:7 in step"], "at": "train.py:7"}]}"""


def step(peer: int, awaits: str, since_s: float = 1.0, kind: str = "recv") -> dict[str, Any]:
    step = {"step": 0, "kind": kind, "peer": peer, "awaits": awaits, "since_s": since_s}
    step |= {"n_bytes": 4096, "n_segments": 4, "ready": 4, "done": 1, "granted": 2}
    return step | ({"started": 0} if kind == "send" else {"arrived": 0, "offered": 0})


def call(*steps: Any, absent: tuple[int, ...] = (), key: int = 5, what: str = WHAT) -> Any:
    made = json.loads(CALL) | {"key": f"{key:016x}", "what": what, "agreement": f"hash of {what}"}
    peers = sorted({one["peer"] for one in steps})
    made["peers"] = [{"rank": rank, "in_call": rank not in absent} for rank in peers]
    made |= {"steps": steps, "n_steps_left": len(steps)}
    return made | {"waits": waits_of(made)}


def state(rank: int, *calls: dict[str, Any], last: int = 5, size: int = 3) -> dict[str, Any]:
    """Return the state that rank `rank` of one group wrote; `last` numbers its last call."""
    group = json.loads(GROUP) | {"rank": rank, "members": list(range(size))}
    group |= {"n_calls": last, "last_number": last, "in_flight": list(calls)}
    world = json.loads(WORLD) | {"rank": rank, "groups": [group]}
    world["ranks"] = [{"host": f"host-{other}", "address": ""} for other in range(size)]
    world["peers"] = [json.loads(PEER) | {"rank": r} for r in range(size) if r != rank]
    own = {"rank": rank, "host": f"host-{rank}", "pid": 100 + rank, "taken_at_s": 1.0 + rank}
    return json.loads(STATE) | own | {"worlds": [world]}


WAITING = call(step(1, "data", 12.0), absent=(1,))
ONE_OWES = call(step(1, "grant", kind="send"), step(2, "data", 3.0), step(2, "data", 9.0))
TWO_OWE = call(step(1, "data", 9.0), step(2, "data", 3.0), absent=(2,))


def test_a_call_names_the_ranks_it_waits_for() -> None:
    for waiting, waits in (
        # A rank that owes data is blamed before one that receives none, by the oldest wait.
        (ONE_OWES, [(2, True, 9.0), (1, False, 1.0)]),
        # Of two ranks that owe data, the one that has not made the call is blamed.
        (TWO_OWE, [(2, True, 3.0), (1, False, 9.0)]),
        *((call(step(1, word)), []) for word in ("turn", "scratch", "nothing")),
    ):
        assert [(w["rank"], w["is_blamed"], w["since_s"]) for w in waiting["waits"]] == waits


def test_every_reason_to_wait_of_the_native_core_is_known() -> None:
    source = (Path(__file__).parents[2] / "native/engine/shell/state_reader.cc").read_text()
    bodies = re.findall(
        r"^const char\* StateReader::\w*awaits\(.*?^}", source, re.DOTALL | re.MULTILINE
    )
    words = {word for body in bodies for word in re.findall(r'"([^"]*)"', body)}
    assert words == WORDS.keys() | {"turn", "scratch", "nothing"}


def test_the_text_names_waiting_and_awaited_ranks_and_times() -> None:
    text = text_of(state(0, WAITING))
    for facts in (
        ("host-0", "process 100"),
        ("'world'", "ranks 0, 1, 2", "5 calls", "1 in flight"),
        ("call 5", WHAT, "4 KiB", "12.3 s", "4.0 s", "6 of 7"),
        ("waits for rank 1 on host-1", "12.0 s"),
        ("step 0", "1 of 4", "4 ready", "2 granted", "0 arrived"),
        ("rank 1 on host-1", "tcp", "0.2 s", "out 1 MiB and 3 frames", "2 KiB", "7 no grant"),
        ("path 1 lost for 2.5 s", "was cut", "3 times", "path 2", "path 3", "0.5 s"),
        ("rtt 1.5 ms", "12 segments", "3 unacknowledged", "8 sent again", "512 B unsent"),
        ("SHOAL_ALGO=ring",),
        ("train.py:7",),
    ):
        assert any(all(fact in line for fact in facts) for line in text.splitlines()), facts
    stuck = state(0)
    stuck["worlds"][0].update(is_stuck=True, groups=[], peers=[])
    del stuck["worlds"][0]["staging"]
    assert "its state cannot be read: a thread holds its lock" in text_of(stuck)


def test_a_state_holds_no_keys_and_names_source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KEY", "sesame")
    monkeypatch.setenv("SHOAL_KEY_FILE", "/a/path")
    written = document.describe("test")
    assert "sesame" not in json.dumps(written) + text_of(written)
    assert written["settings"]["SHOAL_KEY"] == "(set)"
    assert written["settings"]["SHOAL_KEY_FILE"] == "/a/path"
    name = threading.current_thread().name
    mine = next(one for one in written["threads"] if one["name"] == name)
    assert mine["at"].startswith(f"{__file__}:")


STEMS = {
    "/a/b-%r": "/a/b-3",
    "/a/b-%p.json": "/a/b-77",
    "/a/b": "/a/b-rank3",
    "/a/b.txt": "/a/b-rank3",
    "/a/%h/b": "/a/host_1/b-rank3",
    "/a/100%%r": "/a/100%r-rank3",
    "/a/%%%r": "/a/%3",
    "/nowhere/": "/nowhere/shoal-dump-host_1-rank3-77",
    "": "shoal-dump-host_1-rank3-77",
}


def test_a_pattern_names_a_file_per_rank(tmp_path: Path) -> None:
    assert {pattern: stem_of(pattern, 3, "host/1", 77) for pattern in STEMS} == STEMS
    assert stem_of(str(tmp_path), 3, "h", 77) == f"{tmp_path}/shoal-dump-h-rank3-77"


def test_the_setting_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    for setting, pattern in (("", "/tmp/"), ("/x/%r", "/x/%r"), ("off", None)):
        monkeypatch.setenv("SHOAL_DUMP", setting)
        assert pattern_of_job() == pattern


def test_a_missing_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for setting, why in (
        ("{}/gone/%r", "the folder {}/gone does not exist: create it, or end the name with /,"),
        ("{}/gone/dumps", "the folder {}/gone does not exist"),
        ("{}/file/below/", "{}/file is not a folder"),
        ("{}/file/%h/%r", "{}/file is not a folder"),
    ):
        monkeypatch.setenv("SHOAL_DUMP", setting.format(tmp_path))
        with pytest.raises(UsageError, match=re.escape(why.format(tmp_path))) as raised:
            check_folder()
        assert f"on {socket.gethostname()}" in str(raised.value)
        assert "SHOAL_DUMP=off" in str(raised.value)


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere
    monkeypatch.setenv("SHOAL_DUMP", f"{tmp_path}/new/")
    with pytest.raises(UsageError, match=f"this user may not write to {tmp_path}: name another"):
        check_folder()


def test_a_folder_that_vanishes_is_refused_by_no_later_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dumps"
    monkeypatch.setenv("SHOAL_DUMP", f"{folder}/%r")
    with pytest.raises(UsageError, match="does not exist"):
        heed_settings()
    folder.mkdir()
    heed_settings()
    folder.rmdir()
    heed_settings()


def test_folders_may_exist_or_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for setting in ("", "off", ".", "new/", "name", "{}", "{}/new/er/", "{}/name", "{}/%h/%r"):
        monkeypatch.setenv("SHOAL_DUMP", setting.format(tmp_path))
        check_folder()
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    pattern, content = str(tmp_path / "new" / "a-%r"), state(0)
    first = write(content, "one", pattern)
    assert [path.name for path in first] == ["a-0.json", "a-0.txt"]
    (tmp_path / "new" / "a-0-2.txt").write_text("mine")
    second = write(content, "two", pattern)
    assert [path.name for path in second] == ["a-0-3.json", "a-0-3.txt"]
    assert [path.read_text() for path in (first[1], second[1])] == ["one", "two"]
    assert json.loads(second[0].read_text()) == content
    assert (tmp_path / "new" / "a-0-2.txt").read_text() == "mine"
    assert not (tmp_path / "new" / "a-0-2.json").exists()


def test_a_symlink_is_not_followed_and_only_the_owner_may_read_files(tmp_path: Path) -> None:
    (tmp_path / "a-0.json").symlink_to(tmp_path / "elsewhere")
    written = write(state(0), "one", str(tmp_path / "a-%r"))
    assert written[0].name == "a-0-2.json"
    assert not (tmp_path / "elsewhere").exists()
    assert all(path.stat().st_mode & 0o077 == 0 for path in written)


@pytest.mark.parametrize("pattern", ["{}/file/below", "/proc/nowhere/%r", "/a\0b"])
def test_failed_writes_warn(pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert write(state(0), "one", pattern.format(tmp_path)) == ()
    assert "cannot be written to" in caplog.text


@pytest.mark.parametrize("hanging", ["stem_of", "_write"])
def test_a_wait_for_a_hanging_disk_ends(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_back = threading.Event()

    def hang(*_: Any) -> str:
        is_back.wait()
        raise OSError("the disk is back, and read-only")

    monkeypatch.setattr("shoal.state.files._PATIENCE_S", 0.0)
    monkeypatch.setattr(f"shoal.state.files.{hanging}", hang)
    assert write(state(0), "one", str(tmp_path)) == ()
    is_back.set()
    assert "it goes on" in caplog.text


def native(taken_ns: int) -> SimpleNamespace:
    """Return a group that a deadline has ended, whose state can be taken once."""
    states = [{"taken_ns": taken_ns, "groups": [], "peers": []}]
    return SimpleNamespace(take_state_at_deadline=lambda: states.pop() if states else None)


class Context:
    """Return a group without links."""

    epoch, rank, names, groups, mesh = 1, 0, (), (), None


CONTEXT = Context()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SHOAL_DUMP", str(tmp_path))
    monkeypatch.setattr(AtDeadline, "_last", (0, ""))
    monkeypatch.setattr(AtDeadline, "_n_written", 0)
    return tmp_path


def test_a_deadline_is_dumped_once_for_all_groups_that_it_ends(fresh: Path) -> None:
    one, group = AtDeadline(), native(7)
    note = one.note(CONTEXT, group)
    assert note == f"the state of this rank is in {next(fresh.glob('*.txt'))}"
    assert one.note(CONTEXT, group) == note
    assert AtDeadline().note(CONTEXT, native(7)) == note
    assert len(list(fresh.iterdir())) == 2
    notes = [AtDeadline().note(CONTEXT, native(n)) for n in range(10, 20)]
    assert len(list(fresh.glob("*.json"))) == 8  # they do not fill the disk
    assert notes[6].startswith("the state of this rank is in ")
    assert notes[7] == "no state is written after 8 deadlines"


def test_an_unwritable_state_is_noted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.state.text.text_of", lambda _state: 1 / 0)
    note = AtDeadline().note(CONTEXT, native(7))
    assert note.startswith("the state of this rank could not be written: ZeroDivisionError")
    monkeypatch.setenv("SHOAL_DUMP", "off")
    assert AtDeadline().note(CONTEXT, native(8)) == ""
    assert list(fresh.iterdir()) == []


def test_the_signal_is_read_with_and_without_its_prefix() -> None:
    for name in ("USR2", "SIGUSR2", "sigusr2"):
        assert watch.signal_of(name) is signal.SIGUSR2
    for name in ("KILL", "SEGV", "INT", "12", "USR3"):
        wrong = f"SHOAL_DUMP_SIGNAL='{name}' is not one of USR1, USR2"
        with pytest.raises(UsageError, match=wrong):
            watch.signal_of(name)


def test_a_refused_signal_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Mock(side_effect=MemoryError("no descriptor is left"))
    monkeypatch.setattr("shoal.engine.note_signal", refused)
    monkeypatch.setattr(watch, "_watched", 0)
    with caplog.at_level(logging.WARNING):
        watch.call_at(signal.SIGUSR2, print)
    assert "SIGUSR2 will not make this process write its state: no descriptor" in caplog.text


BROADCAST = "broadcast float32[8] from rank 0 by tree"
NAMED = call(step(1, "data"), absent=(1,), key=(1 << 62) + 9)
ENDED_NAMED = state(1, last=0)
ENDED_NAMED["worlds"][0]["groups"][0]["finished"] = [{"key": NAMED["key"], "what": WHAT}]
LATER = {**state(0), "taken_at_s": 99.0}


def test_ranks_that_hold_up_a_job_are_named() -> None:
    for states, lines in (
        # A rank that has not made a call, with its last call.
        (
            [state(0, WAITING), state(2, WAITING), state(1, last=4)],
            [
                ["3 of 3 ranks "],
                [f"rank 1 on host-1 has not made {WHAT} (call 5 ", "'world'", "ranks 0, 2"],
                ["rank 1 on host-1", "12.3 s", "barrier", "train.py:7"],
                *(["rank 0 waits for rank 1, up to 12.0 s"], ["rank 2 waits for rank 1, up to 12"]),
                ["all of them wait", "for rank 1"],
            ],
        ),
        # A rank without a report, whose messages no rank received.
        (
            [state(0, WAITING), state(2, call(step(0, "data", 11.0)))],
            [
                *(["2 of 3 ranks "], ["rank 1 on host-1 has no report, and rank 0 ", WHAT]),
                *(["rank 0 waits for rank 1, up to 12"], ["rank 2 waits for rank 0, up to 11"]),
                ["all of them wait", "for rank 1"],
            ],
        ),
        (
            [state(0, call(step(1, "data"))), state(1, call(step(0, "data"), what=BROADCAST))],
            [["different calls", "'world'", f"rank 0 called {WHAT}", f"rank 1 called {BROADCAST}"]],
        ),
        (
            [
                state(0, call(step(1, "link", kind="send")), size=2),
                state(1, call(step(0, "data")), size=2),
            ],
            [["ranks 0, 1 wait for each other"]],
        ),
        # A named call is missed by its key.
        ([state(0, NAMED), state(1, last=0)], [["rank 1 on host-1 has not made"]]),
        # Of two states of a rank, the one with calls in flight counts.
        ([LATER, state(0, call(step(1, "data")))], [["rank 0 waits for rank 1"]]),
        ([state(0, size=1)], [["1 of 1 ranks reported"], ["no rank that reported had a call"]]),
    ):
        lines_of_verdict = verdict(states).splitlines()
        for facts in lines:
            assert any(all(fact in line for fact in facts) for line in lines_of_verdict), facts


@pytest.mark.parametrize(
    "states",
    [
        [state(0, last=5), state(1, call(step(0, "data")))],  # rank 0 has ended the call
        [state(0, NAMED), ENDED_NAMED],
        [state(0, call(step(1, "data"), key=3 << 62)), state(2, last=0)],  # a message to others
    ],
)
def test_a_rank_is_not_blamed_for_a_call_of_other_ranks(states: list[dict[str, Any]]) -> None:
    assert "has not made" not in verdict(states)


def test_shoal_dump_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write(one, "", str(tmp_path))[0]) for one in (state(0, WAITING), state(1, last=4))]
    for given in (files, map(str, tmp_path.iterdir())):  # texts among them
        assert main(["dump", *given]) == 0
        assert "rank 1 on host-1 has not made" in capsys.readouterr().out
    assert main(["dump", "--text", files[0]]) == 0
    assert capsys.readouterr().out.startswith("shoal on host-0")


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        (None, "No such file or directory"),
        ("{", "is not JSON"),
        ("[]", "is not a state of shoal; this shoal reads version 1"),
        ('{"shoal_dump": 2}', "has version 2; this shoal reads version 1"),
        ('{"shoal_dump": 1, "taken_at_s": 1, "worlds": [{}], "threads": []}', "is damaged"),
    ):
        path = tmp_path / "a.json"
        if content is not None:
            path.write_text(content)
        assert main(["dump", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_rank_that_is_late_to_the_oldest_call_is_named_once_per_doubling_of_its_age() -> None:
    late = call(step(1, "data"), step(2, "data"), absent=(2,))
    later = {**call(step(1, "data"), absent=(1,), key=6), "age_s": 0.1}
    (world,) = state(0, late, later)["worlds"]
    (group,) = world["groups"]
    due = dict[int, tuple[str, float]]()
    n_warnings = []
    for age_s in (9.9, 10.0, 11.0, 19.9, 20.0, 35.0, 90.0, 159.0, 160.0):
        late["age_s"] = age_s
        texts = late_in(world, 7, 10.0, due)
        n_warnings.append(len(texts))
    assert n_warnings == [0, 1, 0, 0, 1, 0, 1, 0, 1]
    assert "has waited 160.0 s in " in texts[0]
    assert " for rank 2" in texts[0]
    group["in_flight"].clear()
    assert late_in(world, 7, 10.0, due) == []
    assert due == {}
    # A rank in the call is not late, nor is one without a message to send yet.
    message = {**call(step(1, "data"), absent=(1,), key=6), "awaits_message": True}
    for one in (call(step(1, "data")), message):
        assert late_in(state(0, one)["worlds"][0], 7, 10.0, {}) == []
