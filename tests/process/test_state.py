"""State dumps: of ranks that wait for a hung one, and on request while they wait."""

import argparse
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from process.ranks import Ranks, on_ranks
from process.serving import await_that
from process.stage import Stage, error_of, on_stage, pretend_hosts, stop
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal.cli import main
from shoal.cli.top import _reader as reader_of
from shoal.errors import TimedOut
from shoal.group import work as work_module
from shoal.state import monitor, remote

VICTIM = 1


def reduce_with_one_that_stops(ranks_per_host: int) -> str:
    """Return the error of a call that the victim does not make in time."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        group.all_reduce(np.ones(100_000, np.float32))
        if group.rank == VICTIM:
            Stage.from_environment().cue("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        error = error_of(group.all_reduce, np.ones(200_000, np.float32), timeout_s=1)
    assert isinstance(error, TimedOut), error
    return str(error)


def files_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"*-rank{rank}-*.json"), key=lambda path: (len(path.name), path))
    return [json.loads(path.read_bytes()) for path in paths]


def test_every_rank_dumps_what_it_waits_for_when_a_deadline_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No setting: the files are where temporary files go. Ranks 0 and 1 share a host.
    env = {"SHOAL_DUMP": "", "TMPDIR": str(tmp_path)}
    with on_stage(reduce_with_one_that_stops, 3, 2, env=env) as (stage, ranks):
        stage.await_cue("stopping")
        for rank in (0, 2):
            ranks.await_end(rank)
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        errors = ranks.values()
    for rank, error in enumerate(errors):
        (state,) = files_of(tmp_path, rank)
        assert state["why"] == "a deadline passed"
        (text,) = tmp_path.glob(f"*-rank{rank}-*.txt")
        assert error.endswith(f"; the state of this rank is in {text}")
    for rank in (0, 2):
        (state,) = files_of(tmp_path, rank)
        (group,) = state["worlds"][0]["groups"]
        (call,) = group["in_flight"]
        assert group["name"] == "world"
        assert call["serial"] == 2
        assert call["what"].startswith("all_reduce float32[200000] sum")
        blamed = {wait["rank"] for wait in call["waits"] if wait["is_blamed"]}
        assert VICTIM in blamed
        assert 0.5 < call["age_s"] < 30
        kinds = [peer["link"] for peer in state["worlds"][0]["peers"]]
        assert kinds == [["none", "shm", "tcp"], [], ["tcp", "tcp", "none"]][rank]

    # The waiting ranks: the victim may make the call when it wakes, before the abort arrives.
    assert main(["dump", *map(str, tmp_path.glob("*-rank[02]-*.json"))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 of 3 ranks ")
    assert "nothing from it in all_reduce float32[200000] sum" in text
    assert text.splitlines()[-1].endswith("for rank 1")


def wait_and_be_asked() -> tuple[bool, str]:
    """Rank 0 waits for rank 1, whose main thread is in a C function that never returns."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        data = np.full(10, group.rank + 1.0)
        if group.rank == VICTIM:
            readable, writable = os.pipe()
            stage.store.set("pipe", f"/proc/{os.getpid()}/fd/{writable}".encode())
            stage.store.set("line", str(sys._getframe().f_lineno + 3).encode())
            stage.cue("reading")
            # The kernel restarts it after every signal, so no Python handler would run.
            ctypes.CDLL(None).read(readable, ctypes.create_string_buffer(1), 1)
        group.all_reduce(data, name="the odd one")
        return bool((data == 3).all()), shoal.dump().text


def main_thread_of(state: dict[str, Any]) -> str:
    return next(str(one["at"]) for one in state["threads"] if one["name"] == "MainThread")


def asked(ranks: Ranks, rank: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a rank's dump for each signal."""
    until = time.monotonic() + 30
    for n in range(1, 1000):
        os.kill(ranks.pid(rank), signal.SIGUSR2)
        while len(list(folder.glob(f"*-rank{rank}-*.txt"))) < n:  # written after the other files
            assert time.monotonic() < until, "it did not write"
            os.sched_yield()
        yield files_of(folder, rank)[-1]


def test_a_signal_makes_a_rank_dump_while_its_main_thread_is_stuck(tmp_path: Path) -> None:
    env = {"SHOAL_DUMP": f"{tmp_path}/", "SHOAL_DUMP_SIGNAL": "USR2"}
    with on_stage(wait_and_be_asked, 2, env=env) as (stage, ranks):
        stage.await_cue("reading")
        here = f"{__file__}:{stage.store.get('line', 30).decode()} in wait_and_be_asked"
        waiting = next(
            state
            for state in asked(ranks, 0, tmp_path)
            if state["worlds"][0].get("n_threads_waiting") == 1
            and any(call["waits"] for call in state["worlds"][0]["groups"][0]["in_flight"])
        )
        stuck = next(one for one in asked(ranks, VICTIM, tmp_path) if main_thread_of(one) == here)
        Path(stage.store.get("pipe", 30).decode()).write_bytes(b"x")
        found = ranks.values()
    assert waiting["why"] == stuck["why"] == "received SIGUSR2"
    (call,) = waiting["worlds"][0]["groups"][0]["in_flight"]
    assert [wait["rank"] for wait in call["waits"]] == [VICTIM]
    assert waiting["worlds"][0]["n_threads_waiting"] == 1
    assert waiting["worlds"][0]["epoch"] == stuck["worlds"][0]["epoch"]
    for is_right, text in found:
        assert is_right
        assert "group 'world' of ranks 0, 1: 1 call made, 0 in flight" in text


@pytest.mark.parametrize("how", ["in the call", "by its work", "by its callback"])
@on_ranks(3, has_stage=True)
def test_waiting_ranks_name_the_rank_that_is_late_to_a_call(how: str) -> None:
    """The victim makes the call once all others have warned."""
    work_module.LATE_S = 0.05
    stage, texts = Stage.from_environment(), list[str]()
    pretend_hosts(1)

    def note(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        if f"for rank {VICTIM} on " in texts[-1]:  # other ranks may be late too, briefly
            stage.cue(f"rank {group.rank} has warned")

    listener = logging.Handler(logging.WARNING)
    listener.emit = note
    with shoal.init() as group:
        group.barrier()
        logging.getLogger("shoal").addHandler(listener)
        data = np.ones(1000, np.float32)
        if group.rank == VICTIM:
            for rank in (0, 2):
                stage.await_cue(f"rank {rank} has warned")
            group.all_reduce(data)
        elif how == "in the call":
            group.all_reduce(data)
        elif how == "by its work":
            group.all_reduce(data, async_op=True).wait()
        else:
            over = threading.Event()
            group.all_reduce(data, async_op=True).on_done(lambda _: over.set())
            assert over.wait(60)
        logging.getLogger("shoal").removeHandler(listener)
        assert data[0] == 3
    if group.rank != VICTIM:
        named = [text for text in texts if f" for rank {VICTIM} on " in text]
        assert named[0].startswith(f"rank {group.rank} on ")
        assert " s in all_reduce float32[1000] sum by " in named[0]
        assert f" of group 'world') for rank {VICTIM} on " in named[0]
        assert len(texts) < 20


# Statistics of running ranks: `Group.stats()`, and `shoal top` in another process.


@on_ranks(2, has_stage=True)
def test_stats_lists_calls_in_flight_and_counts_finished_calls() -> None:
    stage = Stage.from_environment()
    pretend_hosts(1)
    with shoal.init() as group:
        pair = group.subgroup([0, 1], "pair")
        first = group.stats()
        assert (first.rank, first.size, first.n_hosts) == (group.rank, 2, 2)
        assert (first.busy_share, first.in_flight, first.ended) == (None, (), {})
        data = np.ones(25_000, np.float32)
        if group.rank == 0:
            begin_s = time.monotonic()
            work = group.all_reduce(data, async_op=True)
            waiting = await_that(lambda: (s := group.stats()).in_flight[0].waits and s, "its wait")
            (call,) = waiting.in_flight
            assert call.what.startswith("all_reduce float32[25000] sum by ")
            assert (call.group, call.n_bytes) == ("world", 100_000)
            (wait,) = call.waits
            assert (wait.rank, wait.in_call) == (1, False)
            assert wait.host == socket.gethostname()
            assert group.stats().busy_share == pytest.approx(1)  # in flight all the time since
            assert group.stats().busy_s <= time.monotonic() - begin_s
            assert not pair.stats().in_flight
            stage.cue("seen")
            work.wait()
        else:
            stage.await_cue("seen")
            group.all_reduce(data)
        pair.broadcast(data[:10])
        group.barrier()
        after = group.stats()
        assert after.n_calls == 2
        assert after.ended == {"all_reduce": (1, 100_000), "barrier": (1, 1)}
        assert pair.stats().ended == {"broadcast": (1, 40)}
        (link,) = after.links
        assert (link.rank, link.kind, link.state) == (1 - group.rank, "tcp", "alive")
        # Two ranks: each sends and receives at least half of the sum.
        assert 50_000 <= link.bytes_out < 200_000
        assert 50_000 <= link.bytes_in < 200_000
        stage.meet(group.rank, 2, "has counted")
    assert not group.stats().is_readable


def wait_for_the_others() -> None:
    stage = Stage.from_environment()
    with shoal.init() as group:
        group.barrier()
        if group.rank == 0:
            child = os.fork()
            if child == 0:
                raise SystemExit  # runs exit functions registered by the parent
            os.waitpid(child, 0)
        stage.cue(f"rank {group.rank}: is ready")
        if group.rank == 2:
            stage.await_cue("never")
        if group.rank == 1:
            stage.await_cue("go")
        group.all_reduce(np.ones(100_000, np.float32))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of this test."""
    # NOT tmp_path: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as parent:
        folder = Path(parent, "shoal")
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        assert monitor._folders()[0] == folder
        monkeypatch.setattr(monitor, "_folders", lambda: [folder])
        yield folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["top", *words]) == 0
    return capsys.readouterr().out


def test_top_shows_the_state_of_each_rank_of_this_host(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "start a job on this host, as this user, with SHOAL_MONITOR=1" in shown(capsys, "--once")
    env = {"XDG_RUNTIME_DIR": str(runtime.parent), "SHOAL_MONITOR": "1"}
    with on_stage(wait_for_the_others, 3, env=env) as (stage, ranks):
        stage.await_all(3, "is ready")

        def waiting() -> list[dict[str, Any]]:
            found = json.loads(shown(capsys, "--json"))
            calls = [call for one in found for call in one["in_flight"]]
            return found if any(call["waits"] for call in calls) else []

        documents = await_that(waiting, "a rank that waits")
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert {one["pid"] for one in documents} == {ranks.pid(rank) for rank in range(3)}
        screen = shown(capsys, "--once")
        assert "3 ranks here" in screen
        assert f"rank 0, process {ranks.pid(0)}: " in screen
        assert "all_reduce float32[100000] sum by " in screen
        assert "it has not joined this call" in screen
        assert "shm to rank 1 on " in screen
        check_prometheus(shown(capsys, "--prometheus"), documents)

        monkeypatch.setattr(monitor, "PATIENCE_S", 0.2)
        stop(ranks.pid(1))
        assert f"rank 1, process {ranks.pid(1)}: it does not answer" in shown(capsys, "--once")
        os.kill(ranks.pid(1), signal.SIGCONT)
        os.kill(ranks.pid(2), signal.SIGKILL)
        ranks.await_end(2)
        assert list(runtime.glob(f"*-2-{ranks.pid(2)}.sock"))
        shown(capsys, "--once")
        assert not list(runtime.glob(f"*-2-{ranks.pid(2)}.sock"))
        stage.cue("go")
        ranks.wait()
    assert list(runtime.iterdir()) == []


def check_prometheus(text: str, documents: list[dict[str, Any]]) -> None:
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done
    found = {
        (sample.name, int(sample.labels["rank"]), sample.labels.get("peer_rank")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for world in documents:
        calls = found["shoal_calls_total", world["rank"], None]
        assert calls.value == world["n_calls"]
        assert calls.labels == {
            "comm_id": f"0x{world['world']}",
            "hostname": socket.gethostname(),
            "rank": str(world["rank"]),
            "slurm_job_id": "unknown",
            "pid": str(world["pid"]),
            "n_ranks": "3",
            "n_nodes": "1",
        }
        ended = found["shoal_collectives_total", world["rank"], None]
        assert ended.labels["collective"] == "Barrier"
        for link in world["links"]:
            sent = found["shoal_link_sent_bytes_total", world["rank"], str(link["rank"])]
            assert sent.value >= link["bytes_out"]
            assert sent.labels["link"] == "shm"


@pytest.fixture
def keyed(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of ranks that this process reads like a remote host."""
    monkeypatch.setenv("SHOAL_KEY", "k" * 64)
    return {"XDG_RUNTIME_DIR": str(runtime.parent), "SHOAL_MONITOR": "1", "SHOAL_KEY": "k" * 64}


def reader_at(place: remote.Place) -> Callable[[], list[dict[str, Any]]]:
    return reader_of(argparse.Namespace(address=f"{place.address}:{place.port}"))


def watched_member_or_newcomer() -> None:
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    if rank == 3:
        address = stage.store.get("address", 60).decode()
        group = shoal.init(join=address)
    else:
        os.environ["WORLD_SIZE"] = "3"
        group = shoal.init()
        group.barrier()
        stage.cue(f"rank {rank}: is ready")
        try:
            group.recv(bytearray(1), (rank + 1) % 3)  # nobody sends it
        except shoal.PeerLost:
            group = group.shrink()
        if group.rank == 0:
            stage.store.set("address", group.address.encode())
            while not group.newcomers:
                os.sched_yield()
        group.barrier()
        group = group.grow()
    with group:
        stage.cue(f"rank {group.rank}: has grown")
        stage.await_cue("all have been seen")
        group.barrier()


def test_top_follows_a_group_that_loses_rank_0_and_grows(keyed: dict[str, str]) -> None:
    with on_stage(watched_member_or_newcomer, 4, env=keyed) as (stage, ranks):
        stage.await_all(3, "is ready")
        [one] = [found for found in monitor.read_all() if found["rank"] == 1]
        read = reader_at(remote.places_of(one)[1])
        assert [found["pid"] for found in read()] == [ranks.pid(rank) for rank in range(3)]
        os.kill(ranks.pid(0), signal.SIGKILL)
        stage.await_all(3, "has grown")
        assert [found["pid"] for found in read()] == [ranks.pid(rank) for rank in (1, 2, 3)]
        stage.cue("all have been seen")
        ranks.survivors(0)


def member_whose_first_grow_fails_or_newcomer() -> None:
    """Rank 1 forms the larger group and then fails, so all members keep the old one."""
    from shoal.group import growing

    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    form_new = growing.form_new

    def fail(*given: Any) -> shoal.Group:
        form_new(*given).close()
        raise shoal.TimedOut("the first grow fails")

    if rank == 2:
        group = shoal.init(join=stage.store.get("address", 60).decode())
    else:
        os.environ["WORLD_SIZE"] = "2"
        group = shoal.init()
        if rank == 0:
            stage.store.set("address", group.address.encode())
        else:
            growing.form_new = fail  # each time: a grow tries again if the newcomer is soon back
        for size in (2, 3):
            while rank == 0 and not group.newcomers:
                os.sched_yield()
            group.barrier()
            group = group.grow()
            growing.form_new = form_new
            assert group.size == size
            stage.cue(f"rank {rank}: is in a group of {size}")
            stage.await_cue(f"{size} have been seen")
    with group:
        stage.await_cue("3 have been seen")
        group.barrier()


def test_top_finds_a_group_at_its_addresses_after_a_failed_grow(keyed: dict[str, str]) -> None:
    member = member_whose_first_grow_fails_or_newcomer
    with on_stage(member, 3, env=keyed) as (stage, ranks):
        stage.await_all(2, "is in a group of 2")
        one = next(found for found in monitor.read_all() if found["pid"] == ranks.pid(0))
        read = reader_at(remote.places_of(one)[0])
        assert [found.get("pid") for found in read()] == [ranks.pid(rank) for rank in range(2)]
        stage.cue("2 have been seen")
        stage.await_all(2, "is in a group of 3")
        assert [found.get("pid") for found in read()] == [ranks.pid(rank) for rank in range(3)]
        stage.cue("3 have been seen")
        ranks.values()


def test_a_folder_other_users_can_enter_is_not_used(
    runtime: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    runtime.mkdir(mode=0o750)
    assert main(["top", "--once"]) == 2
    assert f"{runtime} must be a folder that only this user can enter" in capsys.readouterr().err
    assert monitor.serve(SimpleNamespace(epoch=1, rank=0)) is None
    assert f"shoal top cannot read this process: {runtime} must be" in caplog.text
    assert list(runtime.iterdir()) == []


def test_another_user_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monitor._answer(here, lambda: b"numbers")
        here.close()
        assert there.recv(1) == b""
