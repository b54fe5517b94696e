"""Ranks that die, are interrupted, or just end: what the others are told, and how soon."""

import os
import signal
import socket
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from process.ranks import Outcome, start_ranks
from process.stage import Stage

import shoal
from shoal.errors import PeerLost

N_ELEMS = 16 << 20  # 64 MiB of float32
SOON_S = 2.0
SIZE = 4


class Told(NamedTuple):
    """What a survivor learned, when, and how it went on."""

    at: float
    error: PeerLost
    again: Exception | None
    total: float


def pretend_hosts(ranks_per_host: int) -> None:
    os.environ["SHOAL_HOST_ID"] = str(int(os.environ["RANK"]) // ranks_per_host)


def error_of(call: Any, *args: Any, **how: Any) -> Exception | None:
    try:
        call(*args, **how)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def reduce_until_a_rank_dies(
    victim: int, shared: bool, ranks_per_host: int, through_stage: bool
) -> tuple[Any, ...]:
    """All-reduce for ever; when a rank is lost, make a group of the others and use it."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    group = shoal.init()
    data = shoal.empty(N_ELEMS) if shared else np.empty(N_ELEMS, np.float32)
    data[:] = 1
    group.all_reduce(data, "max")
    if group.rank == victim:
        stage.cue("busy")
    try:
        while True:
            group.all_reduce(data, "max")
    except PeerLost as error:
        at, lost = time.monotonic(), error
    again = error_of(group.barrier)
    group.close()

    rank = group.rank - (group.rank > victim)
    if through_stage:
        group = shoal.init(stage.store, rank, SIZE - 1)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE - 1))
        group = shoal.init()
    with group:
        data[:] = 1
        group.all_reduce(data)
        assert (data == data[0]).all()
        return tuple(Told(at, lost, again, float(data[0])))


def check_survivors(outcomes: list[Outcome], victim: int, died_at: float) -> None:
    assert outcomes[victim].died == "was killed by SIGKILL"
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert outcome.value is not None, outcome
        told = Told(*outcome.value)
        assert told.error.rank == victim, outcome
        assert told.error.host == socket.gethostname()
        assert f"rank {victim} on {socket.gethostname()}" in str(told.error)
        assert "all_reduce float32[16777216] max" in told.error.doing
        assert told.at - died_at < SOON_S, outcome
        assert isinstance(told.again, PeerLost)
        assert told.again.rank == victim
        assert told.total == SIZE - 1


# Where the ranks are, where their memory lies, and by which algorithm they reduce. In a ring each
# rank talks to two others only: the third has to be told by somebody.
CAST = [
    pytest.param(4, False, "", True, id="private memory"),
    pytest.param(4, True, "ring", False, id="shared memory in a ring"),
    pytest.param(2, False, "", True, id="two hosts"),
    pytest.param(1, False, "ring", False, id="four hosts in a ring"),
]


@pytest.mark.parametrize(("ranks_per_host", "shared", "algorithm", "through_stage"), CAST)
@pytest.mark.parametrize("victim", range(SIZE))
def test_all_survivors_of_a_killed_rank_are_told_soon_and_can_go_on(
    victim: int, ranks_per_host: int, shared: bool, algorithm: str, through_stage: bool
) -> None:
    args = victim, shared, ranks_per_host, through_stage
    with Stage() as stage:
        env = {**stage.env, "SHOAL_ALGO": algorithm}
        with start_ranks(reduce_until_a_rank_dies, SIZE, *args, env=env) as ranks:
            stage.await_cue("busy")
            died_at = time.monotonic()
            os.kill(ranks.pid(victim), signal.SIGKILL)
            outcomes = ranks.wait()
    check_survivors(outcomes, victim, died_at)
