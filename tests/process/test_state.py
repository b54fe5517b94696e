"""State dumps: of ranks that wait for a hung one, and on request while they wait."""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.ranks import Ranks, on_ranks, start_ranks
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.cli import main
from shoal.errors import TimedOut
from shoal.group import work as work_module

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
    """Return the files a rank wrote, in order."""
    paths = sorted(folder.glob(f"*-rank{rank}-*.json"), key=lambda path: (len(path.name), path))
    return [json.loads(path.read_bytes()) for path in paths]


def test_every_rank_dumps_what_it_waits_for_when_a_deadline_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No setting: the files are where temporary files go. Ranks 0 and 1 share a host.
    place = {"SHOAL_DUMP": "", "TMPDIR": str(tmp_path)}
    with Stage() as stage:
        env = {**stage.env, **place}
        with start_ranks(reduce_with_one_that_stops, 3, 2, env=env) as ranks:
            stage.await_cue("stopping")
            for rank in (0, 2):
                ranks.await_end(rank)
            os.kill(ranks.pid(VICTIM), signal.SIGCONT)
            outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.value is not None, outcome
        (state,) = files_of(tmp_path, rank)
        assert state["why"] == "a deadline passed"
        (text,) = tmp_path.glob(f"*-rank{rank}-*.txt")
        assert outcome.value.endswith(f"; the state of this rank is in {text}")
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
    """Rank 0 waits for rank 1, whose main thread is in a C function that never returns.

    Returns:
        True if the result is right, and the output of shoal.dump().
    """
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
    """Return the program's line in which the main thread is."""
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
    with Stage() as stage:
        env = {**stage.env, "SHOAL_DUMP": f"{tmp_path}/", "SHOAL_DUMP_SIGNAL": "USR2"}
        with start_ranks(wait_and_be_asked, 2, env=env) as ranks:
            stage.await_cue("reading")
            here = f"{__file__}:{stage.store.get('line', 30).decode()} in wait_and_be_asked"
            waiting = next(
                state
                for state in asked(ranks, 0, tmp_path)
                if state["worlds"][0].get("n_threads_waiting") == 1
                and any(call["waits"] for call in state["worlds"][0]["groups"][0]["in_flight"])
            )
            stuck = next(
                state for state in asked(ranks, VICTIM, tmp_path) if main_thread_of(state) == here
            )
            with open(stage.store.get("pipe", 30).decode(), "wb") as pipe:
                pipe.write(b"x")
            outcomes = ranks.wait()
    assert waiting["why"] == stuck["why"] == "received SIGUSR2"
    (call,) = waiting["worlds"][0]["groups"][0]["in_flight"]
    assert [wait["rank"] for wait in call["waits"]] == [VICTIM]
    assert waiting["worlds"][0]["n_threads_waiting"] == 1
    assert waiting["worlds"][0]["epoch"] == stuck["worlds"][0]["epoch"]
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        is_right, text = outcome.value
        assert is_right
        assert "group 'world' of ranks 0, 1: 1 call made, 0 in flight" in text


@pytest.mark.parametrize("how", ["in the call", "by its work", "by its callback"])
@on_ranks(3, has_stage=True)
def test_waiting_ranks_name_the_rank_that_is_late_to_a_call(how: str) -> None:
    """The victim makes the call once all others have warned."""
    work_module.LATE_S = 0.05  # type: ignore[misc]
    stage, texts = Stage.from_environment(), list[str]()
    pretend_hosts(1)

    def note(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        if f"for rank {VICTIM} on " in texts[-1]:  # other ranks may be late too, briefly
            stage.cue(f"rank {group.rank} has warned")

    listener = logging.Handler(logging.WARNING)
    listener.emit = note  # type: ignore[method-assign]
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
