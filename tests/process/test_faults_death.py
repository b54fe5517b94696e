"""Ranks that die, are interrupted, or just end: what the others are told, and how soon."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from process.ranks import Outcome, free_port, start_ranks
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal import engine
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


def reduce_until_a_rank_dies(
    victim: int, shared: bool, ranks_per_host: int, through_stage: bool
) -> tuple[Any, ...]:
    """All-reduce for ever; when a rank is lost, make a group of the others and use it."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    group = shoal.init()
    data = shoal.empty(N_ELEMS) if shared else np.empty(N_ELEMS, np.float32)
    data[:] = 1
    try:
        for turn in itertools.count():
            if (turn, group.rank) == (1, victim):
                stage.cue("busy")
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
        del os.environ["LOCAL_RANK"]
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
            outcomes = ranks.wait(30)
    check_survivors(outcomes, victim, died_at)


# Deaths of other kinds.


def lose_two(victims: tuple[int, int]) -> tuple[float, Exception, float] | None:
    stage = Stage.from_environment()
    group = shoal.init()
    data = np.ones(N_ELEMS, np.float32)
    error = None
    try:
        for turn in itertools.count():
            if (turn, group.rank) == (1, victims[0]):
                stage.cue("busy")
            group.all_reduce(data, "max")
    except PeerLost as lost:
        at, error = time.monotonic(), lost
    group.close()
    survivors = [rank for rank in range(group.size) if rank not in victims]
    with shoal.init(stage.store, survivors.index(group.rank), len(survivors)) as group:
        data[:] = 1
        group.all_reduce(data)
        return at, error, float(data[-1])


def test_survivors_of_two_deaths_at_once_are_told_of_one_and_can_go_on() -> None:
    victims = 1, 2
    with Stage() as stage, start_ranks(lose_two, SIZE, victims, env=stage.env) as ranks:
        stage.await_cue("busy")
        died_at = time.monotonic()
        for victim in victims:
            os.kill(ranks.pid(victim), signal.SIGKILL)
        outcomes = ranks.wait(30)
    for rank in (0, 3):
        at, error, total = outcomes[rank].value
        assert error.rank in victims, error
        assert at - died_at < SOON_S
        assert total == 2


def rest_until_a_rank_dies(ranks_per_host: int) -> tuple[float, Exception | None, Exception | None]:
    """Nobody calls anything while rank 1 dies, and rank 0 is asleep in a call that waits for it."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    with shoal.init() as group:
        group.barrier()
        stage.cue(f"rank {group.rank} is at rest")
        if group.rank == 1:
            stage.await_cue("never")
        if group.rank == 0:
            error = error_of(group.recv, np.empty(1), 1)
            at = time.monotonic()
            stage.cue("rank 0 was told")
        else:
            stage.await_cue("rank 0 was told")
            error = error_of(group.all_reduce, np.ones(10))
            at = stage.await_cue("rank 0 was told")
        return at, error, error_of(group.barrier)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("ranks_per_host", [3, 1])
def test_a_death_while_nobody_calls_fails_the_next_call_at_once(
    ending: signal.Signals, ranks_per_host: int
) -> None:
    with (
        Stage() as stage,
        start_ranks(rest_until_a_rank_dies, 3, ranks_per_host, env=stage.env) as ranks,
    ):
        for rank in range(3):
            stage.await_cue(f"rank {rank} is at rest")
        died_at = time.monotonic()
        os.kill(ranks.pid(1), ending)
        first, victim, third = ranks.wait(30)
    assert victim.died == f"was killed by {ending.name}"
    for survivor in (first, third):
        assert survivor.value is not None, survivor
        at, *errors = survivor.value
        assert at - died_at < SOON_S
        for error in errors:
            assert isinstance(error, PeerLost)
            assert bool(error.address) == (ranks_per_host == 1)  # none inside a host
            assert error.rank == 1
            assert "its process died" in str(error)


def n_sockets() -> int:
    """How many this process holds."""
    with os.scandir("/proc/self/fd") as found:
        names = [os.path.realpath(each.path) for each in found]
    return sum("/socket:" in name for name in names)


def sleep_until_a_host_mate_dies(victim: int, early: bool) -> tuple[float, Exception | None, int]:
    """Everyone sleeps in a call that waits for the victim, which has no socket to anybody."""
    stage = Stage.from_environment()
    before = n_sockets()
    if early and int(os.environ["RANK"]) == victim:
        # It has met the others, and holds nothing yet but its part of the memory they share.
        kill = types.SimpleNamespace(create=lambda **_: os.kill(os.getpid(), signal.SIGKILL))
        engine.Mesh = kill  # type: ignore[assignment, misc]
    group = shoal.init()
    if not early:
        group.barrier()
        stage.cue(f"rank {group.rank} is there")
    n_more = n_sockets() - before
    if group.rank == victim:
        stage.await_cue("never")
    error = error_of(group.barrier)
    at = time.monotonic()
    group.close()
    return at, error, n_more


@pytest.mark.parametrize("early", [False, True])
def test_a_killed_rank_is_known_to_all_of_its_host_without_a_socket_to_any(early: bool) -> None:
    size, victim = 8, 3
    with (
        Stage() as stage,
        start_ranks(sleep_until_a_host_mate_dies, size, victim, early, env=stage.env) as ranks,
    ):
        if early:
            ranks.await_end(victim)
        else:
            for rank in range(size):
                stage.await_cue(f"rank {rank} is there")
            os.kill(ranks.pid(victim), signal.SIGKILL)
        died_at = time.monotonic()
        outcomes = ranks.wait(30)
    assert outcomes.pop(victim).died == "was killed by SIGKILL"
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        at, error, n_more = outcome.value
        assert isinstance(error, PeerLost), outcome
        assert error.rank == victim
        assert "its process died" in str(error)
        assert at - died_at < SOON_S, outcome
        assert n_more == 1  # what wakes this process, whoever does


def die_outside_the_subgroup() -> tuple[float, Exception | None]:
    stage = Stage.from_environment()
    with shoal.init() as world:
        world.barrier()
        if world.rank == 2:
            for rank in (0, 1):
                stage.await_cue(f"rank {rank} is through")
            os.kill(os.getpid(), signal.SIGKILL)
        group = world.subgroup([0, 1], "pair")
        stage.cue(f"rank {world.rank} is through")
        world_error = error_of(world.barrier)
        data = np.ones(100_000)
        group.all_reduce(data)
        return float(data[0]), world_error


def test_a_group_without_the_dead_rank_lives_on() -> None:
    with Stage() as stage, start_ranks(die_outside_the_subgroup, 3, env=stage.env) as ranks:
        first, second, _ = ranks.wait(30)
    for survivor in (first, second):
        assert survivor.value is not None, survivor
        total, error = survivor.value
        assert total == 2.0
        assert isinstance(error, PeerLost)
        assert error.rank == 2


# Interrupts.


def wait_for_an_interrupt(busy: bool) -> tuple[Exception | None, float]:
    """Rank 1 is interrupted in a call that nobody answers; rank 0 waits for it in another."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        if busy:
            threading.Thread(target=reduce_for_ever, args=[group], daemon=True).start()
        if group.rank == 0:
            return error_of(group.recv, np.empty(1), 1), time.monotonic()
        # Runs only when the main thread lets the interpreter go: when it waits.
        threading.Thread(target=stage.cue, args=["waiting"]).start()
        group.recv(np.empty(1), 0)
    raise AssertionError("nobody sent that")


def reduce_for_ever(group: shoal.Group) -> None:
    data = np.ones(1_000_000, np.float32)
    while error_of(group.all_reduce, data, name="background") is None:
        pass


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_ends_a_waiting_rank_cleanly_and_the_others_are_told(busy: bool) -> None:
    with Stage() as stage, start_ranks(wait_for_an_interrupt, 2, busy, env=stage.env) as ranks:
        stage.await_cue("waiting")
        interrupted_at = time.monotonic()
        os.kill(ranks.pid(1), signal.SIGINT)
        other, interrupted = ranks.wait(30)
    assert isinstance(interrupted.error, KeyboardInterrupt), interrupted
    assert interrupted.died == ""
    assert interrupted.output.count("Traceback") == 1, interrupted.output
    assert other.value is not None, other
    error, told_at = other.value
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "left the group" in str(error)
    assert told_at - interrupted_at < SOON_S


# Ends without a close, as plain programs.

BEGIN = """
import os, sys
import numpy as np
import shoal
data = np.ones(1_000_000)
"""
ENDINGS = {
    "a global": "group = shoal.init(); group.all_reduce(data); assert data[0] == 2",
    "forgotten": "shoal.init().all_reduce(data); assert data[0] == 2",
    "in a function": "def main():\n    group = shoal.init(); group.all_reduce(data)\nmain()",
    "a subgroup": "part = shoal.init().subgroup([0, 1], 'part'); part.all_reduce(data)",
    "calls in flight": """
group = shoal.init()
for _ in range(10):
    group.all_reduce(data, async_op=True)
    group.all_reduce(shoal.empty(10**6), async_op=True)
""",
    "a callback to come": """
group = shoal.init()
group.recv(data, 1 - group.rank, async_op=True).on_done(lambda work: None)
""",
    "a failing callback": """
group = shoal.init()
work = group.all_reduce(data, async_op=True)
work.on_done(lambda work: 1 / 0)
work.wait()
""",
    "shared memory": "group = shoal.init(); keep = shoal.empty(10**6); group.all_reduce(keep)",
    "an exit code": "group = shoal.init(); group.all_reduce(data); sys.exit(0)",
    "threads that wait": """
import threading
group = shoal.init()
def wait(tag):
    try: group.recv(np.empty(1), 1 - group.rank, tag)
    except shoal.ShoalError: pass
for tag in range(3): threading.Thread(target=wait, args=[tag], daemon=True).start()
group.barrier()
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_without_a_close_ends_well_and_in_silence(ending: str) -> None:
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + ENDINGS[ending]],
            env={**env, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [program.communicate(timeout=30)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert [program.returncode for program in programs] == [0, 0], outputs
    if ending == "a failing callback":
        assert all(output.count("ZeroDivisionError") == 1 for output in outputs), outputs
    else:
        assert outputs == ["", ""]
