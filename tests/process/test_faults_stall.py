"""Ranks that stop for a while or forever. A stall needs real time, so these tests take it."""

import os
import signal
import threading
import time

import numpy as np
from process.ranks import start_ranks
from process.stage import Stage, error_of, pretend_hosts, stop

import shoal
from shoal.errors import PeerLost

SIZE, VICTIM = 4, 1
N_ELEMS = 1 << 20
SLOT_ELEMS = 32 << 10  # 128 KiB of float32: one segment, in a slot of shared memory


def reduce_through_a_stall() -> int:
    """All-reduce until rank 0 ends it; return the number of calls."""
    pretend_hosts(2)  # the stalled rank is silent over shared memory and over TCP
    stage = Stage.from_environment()
    n_calls, go_on = 0, np.ones(1)
    with shoal.init() as group:
        while go_on[0]:
            data = np.full(N_ELEMS, group.rank + 1, np.float32)
            group.all_reduce(data)
            assert (data == 10).all()
            if n_calls == 0 and group.rank == VICTIM:
                stage.cue("busy")
            go_on[0] = group.rank != 0 or stage.store.try_get("cue/enough") is None
            group.all_reduce(go_on, "min")
            n_calls += 1
    return n_calls


def test_a_stall_of_three_seconds_is_harmless() -> None:
    with Stage() as stage, start_ranks(reduce_through_a_stall, SIZE, env=stage.env) as ranks:
        stage.await_cue("busy")
        os.kill(ranks.pid(VICTIM), signal.SIGSTOP)
        threading.Event().wait(3)
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        stage.cue("enough")
        n_calls = ranks.values(30)
    assert n_calls[0] > 0
    assert n_calls == [n_calls[0]] * SIZE


def receive_when_given_up() -> tuple[Exception | None, float, Exception | None]:
    """The victim waits for rank 0, its host-mate, and stops; the others go on without it."""
    pretend_hosts(2)
    stage = Stage.from_environment()
    with shoal.init() as group:
        data = np.ones(SLOT_ELEMS, np.float32)
        if group.rank == VICTIM:
            work = group.recv(data, 0, async_op=True)
            assert work is not None
            group.send(np.ones(1), 0)
            stage.await_cue("reused")
            lost = error_of(work.wait)
            assert lost is not None, f"{data} came from nobody"
            return lost, 0.0, error_of(group.barrier)
        if group.rank == 0:
            group.recv(np.empty(1), VICTIM)  # follows the grant of the victim's receive
            stage.cue("waiting")
        stage.await_cue("stopped")
        if group.rank == 0:
            group.send(np.full(SLOT_ELEMS, 7, np.float32), VICTIM)
        lost, at = error_of(group.barrier), time.monotonic()
        rest = group.subgroup([rank for rank in range(SIZE) if rank != VICTIM], "rest")
        for _ in range(100):
            data[:] = 9
            rest.broadcast(data)
        stage.cue(f"reused by {group.rank}")
        stage.await_cue("reused")
        return lost, at, error_of(rest.barrier)


def test_a_rank_that_stops_forever_is_evicted_and_receives_no_later_data() -> None:
    with Stage() as stage, start_ranks(receive_when_given_up, SIZE, env=stage.env) as ranks:
        stage.await_cue("waiting")
        stopped_at = time.monotonic()
        stop(ranks.pid(VICTIM))
        stage.cue("stopped")
        for rank in set(range(SIZE)) - {VICTIM}:
            stage.await_cue(f"reused by {rank}")
        stage.cue("reused")
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        found = ranks.values(30)
    lost, _, next_error = found.pop(VICTIM)
    for error in (lost, next_error):
        assert isinstance(error, PeerLost)
    assert "gave this rank up" in str(lost)
    for lost, at, next_error in found:
        assert isinstance(lost, PeerLost)
        assert lost.rank == VICTIM
        assert "was silent for" in str(lost)
        assert at - stopped_at > 4.5
        assert next_error is None
