"""Ranks that the others gave up while they were stopped, and that come back while those work on."""

import os
import signal

import numpy as np
from process.ranks import start_ranks
from process.stage import Stage, error_of, stop

import shoal
from shoal.errors import PeerLost

N_ELEMS = 32 << 10  # 128 KiB of float32: one segment, in a slot of shared memory
ZOMBIE = 2


def receive_when_given_up() -> tuple[Exception | None, Exception | None]:
    """Rank 2 receives from rank 0, and is stopped before it can; 0 and 1 work on without it."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        data = np.full(N_ELEMS, 1, np.float32)
        if group.rank == ZOMBIE:
            work = group.recv(data, 0, async_op=True)
            assert work is not None
            stage.cue("waiting")
            stage.await_cue("reused")
            lost = error_of(work.wait)
            assert lost is not None, f"{data} came from nobody"
            return lost, error_of(group.barrier)
        stage.await_cue("stopped")
        if group.rank == 0:
            group.send(np.full(N_ELEMS, 7, np.float32), ZOMBIE)
        lost = error_of(group.barrier)
        pair = group.subgroup([0, 1], "pair")
        for _ in range(100):
            data[:] = 9
            pair.broadcast(data)
        stage.cue(f"reused by {group.rank}")
        stage.await_cue("reused")
        pair.barrier()
        return lost, None


def test_a_rank_that_was_given_up_while_stopped_never_receives_what_the_others_do_now() -> None:
    with Stage() as stage, start_ranks(receive_when_given_up, 3, env=stage.env) as ranks:
        stage.await_cue("waiting")
        stop(ranks.pid(ZOMBIE))
        stage.cue("stopped")
        for rank in (0, 1):
            stage.await_cue(f"reused by {rank}")
        stage.cue("reused")
        os.kill(ranks.pid(ZOMBIE), signal.SIGCONT)
        outcomes = ranks.wait(30)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        assert isinstance(outcome.value[0], PeerLost), outcome
    for survivor in outcomes[:2]:
        assert survivor.value[0].rank == ZOMBIE
    assert "gave this rank up" in str(outcomes[ZOMBIE].value[0])
    assert isinstance(outcomes[ZOMBIE].value[1], PeerLost)
