"""The helper that runs ranks: whatever a rank does, its test learns of it and goes on."""

import os
import signal
import sys
import threading

import pytest
from process.blank import what_is_loaded
from process.ranks import Outcome, run_ranks, start_ranks
from process.stage import Stage

from shoal.errors import PeerLost


def place() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLOUR"))


def end(how: str) -> None:
    if os.environ["RANK"] == "0":
        return
    sys.stdout.write("said before the end\n")
    if how == "raise":
        raise PeerLost(3, "spruce")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    Stage.from_environment().cue("rank 1 is about to hang")
    threading.Event().wait()


def outcomes(how: str) -> list[Outcome]:
    with start_ranks(end, 2, how) as ranks:
        return ranks.wait()


def test_each_rank_returns_its_value_and_sees_the_environment_of_torchrun() -> None:
    want = [("0", "2", "0", "blue"), ("1", "2", "1", "blue")]
    assert run_ranks(place, 2, env={"COLOUR": "blue"}) == want


def test_a_rank_that_raises_gives_its_exception_and_its_output() -> None:
    first, second = outcomes("raise")
    assert (first.error, first.died) == (None, "")
    assert isinstance(second.error, PeerLost)
    assert (second.error.rank, second.error.host) == (3, "spruce")
    assert "said before the end" in second.output


def test_a_rank_that_dies_is_told_by_its_signal() -> None:
    assert [outcome.died for outcome in outcomes("die")] == ["", "was killed by SIGKILL"]


def test_a_rank_that_hangs_is_killed_and_shows_where_it_waited() -> None:
    with Stage() as stage, start_ranks(end, 2, "hang", env=stage.env) as ranks:
        stage.await_cue("rank 1 is about to hang")
        ranks.await_end(0)
        first, second = ranks.wait(0.2)
    assert first.died == ""
    assert second.died == "was killed: it still ran after 0.2 s"
    assert "threading.py" in second.output


def test_a_failure_names_every_rank_that_failed() -> None:
    with pytest.raises(AssertionError, match="1 of 2 ranks failed:\nrank 1 raised PeerLost"):
        run_ranks(end, 2, "raise")


def test_a_rank_begins_without_the_native_core_and_with_an_environment_of_its_own() -> None:
    for native, _, env, n_threads in run_ranks(what_is_loaded, 2, env={"COLOUR": "blue"}):
        assert not native
        assert env["COLOUR"] == "blue"
        assert n_threads == 1
    assert "COLOUR" not in run_ranks(what_is_loaded, 1)[0][2]


def test_neighbours_order_their_sets_differently() -> None:
    (_, first, *_), (_, second, *_) = run_ranks(what_is_loaded, 2)
    assert first != second


def test_what_libraries_read_as_they_load_is_there_before_they_do() -> None:
    seeded = {"PYTHONHASHSEED": "7"}
    (_, first, *_), (_, second, *_) = run_ranks(what_is_loaded, 2, env=seeded)
    assert first == second
