"""Ranks that stop for a while, and for ever. Real time passes here: a stall is nothing else."""

import os
import signal
import threading
import time

import numpy as np
from process.ranks import start_ranks
from process.stage import Stage, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError

SIZE, VICTIM = 4, 1
N_ELEMS = 1 << 20


def reduce_through_stalls(ranks_per_host: int) -> tuple[float, Exception | None, int]:
    """All-reduce until told to stop or until it fails; when, how, and after how many calls."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    n_calls = 0
    with shoal.init() as group:
        try:
            go_on = np.ones(1)
            while go_on[0]:
                data = np.full(N_ELEMS, group.rank + 1, np.float32)
                group.all_reduce(data)
                assert (data == 10).all()
                if n_calls == 0 and group.rank == VICTIM:
                    stage.cue("busy")
                # Rank 0 decides for all; the others are told along with the data.
                go_on[0] = group.rank != 0 or stage.store.try_get("cue/enough") is None
                group.all_reduce(go_on, "min")
                n_calls += 1
        except ShoalError as error:
            return time.monotonic(), error, n_calls
    return time.monotonic(), None, n_calls


def test_a_stall_of_three_seconds_is_harmless() -> None:
    # Two hosts of two: the stalled rank is silent over shared memory and over TCP.
    with Stage() as stage, start_ranks(reduce_through_stalls, SIZE, 2, env=stage.env) as ranks:
        stage.await_cue("busy")
        os.kill(ranks.pid(VICTIM), signal.SIGSTOP)
        threading.Event().wait(3)
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        stage.cue("enough")
        outcomes = ranks.wait(30)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        _, error, n_calls = outcome.value
        assert error is None
        assert n_calls > 0
    assert len({outcome.value[2] for outcome in outcomes}) == 1


def test_a_rank_that_stops_for_ever_is_evicted_and_ends_by_itself_when_it_wakes() -> None:
    with Stage() as stage, start_ranks(reduce_through_stalls, SIZE, 2, env=stage.env) as ranks:
        stage.await_cue("busy")
        stopped_at = time.monotonic()
        os.kill(ranks.pid(VICTIM), signal.SIGSTOP)
        for rank in set(range(SIZE)) - {VICTIM}:
            ranks.await_end(rank)
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        outcomes = ranks.wait(30)
    zombie = outcomes.pop(VICTIM)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        at, error, _ = outcome.value
        assert isinstance(error, PeerLost)
        assert error.rank == VICTIM
        assert "was silent for" in str(error)
        assert at - stopped_at > 4.5
    assert zombie.value is not None, zombie
    _, error, _ = zombie.value
    assert isinstance(error, PeerLost)
    assert "gave this rank up: this rank was silent for" in str(error)
