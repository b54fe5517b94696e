"""Ranks that die, stop, are interrupted, or just end: the error of the others, and its delay.

A stall needs real time, so its tests take it. test_views.py kills two ranks at a time.
`SHOAL_SOAK=1` kills a hundred ranks in each kind of group, as `make test-soak` does.
"""

import gc
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from process.ranks import on_ranks, on_survivors, start_ranks
from process.stage import Stage, descriptors, die, error_of, on_stage, pretend_hosts, stop

import shoal
from shoal.errors import PeerLost

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_KILLS = 100 if SOAK else 1
N_ELEMS = 1_000_003
SOON_S = 2.0


class Kill(NamedTuple):
    """The rank that dies, its call, and the element whose result it awaits; -1: none."""

    victim: int
    turn: int = 1
    element: int = -1


class Case(NamedTuple):
    """A group in which ranks are killed, and how the survivors meet again."""

    size: int
    ranks_per_host: int
    victims: tuple[int, ...] = ()  # drawn where there are none
    shared: bool = False
    algorithm: str = ""
    through_stage: bool = True


# In a ring each rank talks to only two others, which must report the dead rank to the third.
CASES = {
    "private memory": Case(4, 4, (0, 2)),
    "shared memory in a ring": Case(4, 4, (1, 3), True, "ring", False),
    "two hosts": Case(4, 2, (0, 3), through_stage=False),
    "four hosts in a ring": Case(4, 1, (0, 1, 2), False, "ring", False),
    "hosts that differ": Case(3, 2),
    "more ranks than cores": Case(8, 8),
    "eight hosts": Case(8, 1),
}


def kills(case: Case) -> list[Kill]:
    """Return kills that are the same in every run."""
    dice = random.Random(case.size)
    if not SOAK and case.victims:
        return [Kill(victim) for victim in case.victims]
    elements = [-1, 0, N_ELEMS - 1, *(dice.randrange(N_ELEMS) for _ in range(N_KILLS))]
    return [
        Kill(dice.randrange(case.size), dice.randrange(3), dice.choice(elements))
        for _ in range(N_KILLS)
    ]


def reduce_until_killed(case: Case, kill: Kill) -> float:
    """All-reduce until a rank is lost; then form a group of the others. Return when it was lost."""
    pretend_hosts(case.ranks_per_host)
    stage = Stage.from_environment()
    group = shoal.init()
    n, data = group.size, shoal.empty(N_ELEMS) if case.shared else np.empty(N_ELEMS, np.float32)
    try:
        for turn in itertools.count():
            data[:] = group.rank + turn
            if (group.rank, turn) == (kill.victim, kill.turn):
                end_in_call(group, data, kill.element)
            group.all_reduce(data)
            assert (data == n * turn + n * (n - 1) // 2).all(), f"wrong sum in call {turn}"
    except PeerLost as error:
        at, lost = time.monotonic(), error
    again = error_of(group.barrier)
    group.close()
    host = socket.gethostname()
    assert (lost.rank, lost.host) == (kill.victim, host)
    assert f"rank {kill.victim} on {host}" in str(lost)
    # The rank that noticed was connected to it, or was about to be.
    assert "its process died" in str(lost) or "no process listens at" in str(lost), lost
    assert f"all_reduce float32[{N_ELEMS}] sum" in lost.doing
    assert isinstance(again, PeerLost)
    assert again.rank == kill.victim

    rank = group.rank - (group.rank > kill.victim)
    if case.through_stage:
        group = shoal.init(stage.store, rank, n - 1)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(n - 1))
        del os.environ["LOCAL_RANK"]
        group = shoal.init()
    with group:
        data[:] = 1
        group.all_reduce(data)
        assert (data == n - 1).all()
    return at


def end_in_call(group: shoal.Group, data: Any, element: int) -> None:
    own = data[element]
    work = group.all_reduce(data, async_op=True)
    while element >= 0 and data[element] == own and not work.done():
        pass
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(240 * N_KILLS)
@pytest.mark.parametrize("name", CASES)
def test_all_survivors_name_a_killed_rank_soon_and_can_go_on(name: str) -> None:
    case = CASES[name]
    for kill in kills(case):
        env = {"SHOAL_ALGO": case.algorithm}
        with on_stage(reduce_until_killed, case.size, case, kill, env=env) as (_, ranks):
            ranks.await_end(kill.victim)
            died_at = time.monotonic()
            for lost_at in ranks.survivors(kill.victim, deadline_s=30):
                assert lost_at - died_at < SOON_S, kill


def rest_until_a_rank_dies(ranks_per_host: int) -> tuple[float, Exception | None, Exception | None]:
    """Only rank 0 is in a call, asleep, and waits for rank 1 when that dies."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    with shoal.init() as group:
        group.barrier()
        stage.cue(f"rank {group.rank}: is at rest")
        if group.rank == 1:
            stage.await_cue("never")
        if group.rank == 0:
            error = error_of(group.recv, np.empty(1), 1)
            at = time.monotonic()
            stage.cue("rank 0 has its error")
        else:
            stage.await_cue("rank 0 has its error")
            error = error_of(group.all_reduce, np.ones(10))
            at = stage.await_cue("rank 0 has its error")
        return at, error, error_of(group.barrier)


@pytest.mark.parametrize(
    ("ending", "ranks_per_host"), [(signal.SIGKILL, 3), (signal.SIGKILL, 1), (signal.SIGTERM, 1)]
)
def test_a_death_between_calls_fails_the_next_call_at_once(
    ending: signal.Signals, ranks_per_host: int
) -> None:
    with on_stage(rest_until_a_rank_dies, 3, ranks_per_host) as (stage, ranks):
        stage.await_all(3, "is at rest")
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
            assert bool(error.address) == (ranks_per_host == 1)  # no connection inside a host
            assert error.rank == 1
            assert "its process died" in str(error)


def wait_for_an_interrupt(busy: bool) -> tuple[Exception | None, float]:
    """Rank 1 is interrupted in a call that no rank joins; rank 0 waits for it in another."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        if busy:
            threading.Thread(target=reduce_for_ever, args=[group], daemon=True).start()
        if group.rank == 0:
            return error_of(group.recv, np.empty(1), 1), time.monotonic()
        # Runs only when the main thread releases the interpreter to wait.
        threading.Thread(target=stage.cue, args=["waiting"]).start()
        group.recv(np.empty(1), 0)
    raise AssertionError("nobody sent that")


def reduce_for_ever(group: shoal.Group) -> None:
    data = np.ones(1_000_000, np.float32)
    while error_of(group.all_reduce, data, name="background") is None:
        pass


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_ends_a_waiting_rank_cleanly_and_the_others_get_an_error(busy: bool) -> None:
    with on_stage(wait_for_an_interrupt, 2, busy) as (stage, ranks):
        stage.await_cue("waiting")
        interrupted_at = time.monotonic()
        os.kill(ranks.pid(1), signal.SIGINT)
        other, interrupted = ranks.wait(30)
    assert isinstance(interrupted.error, KeyboardInterrupt), interrupted
    assert interrupted.died == ""
    assert interrupted.output.count("Traceback") == 1, interrupted.output
    assert other.value is not None, other
    error, failed_at = other.value
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "left the group" in str(error)
    assert failed_at - interrupted_at < SOON_S


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


def run_as_main(program: str) -> None:
    """Run a program, and leave its objects to the end of the interpreter."""
    exec(program, sys.modules["__main__"].__dict__)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_without_a_close_succeeds_silently(ending: str) -> None:
    with start_ranks(run_as_main, 2, BEGIN + ENDINGS[ending]) as ranks:
        for outcome in ranks.wait(30):
            assert (outcome.error, outcome.died) == (None, ""), outcome
            if ending == "a failing callback":
                assert outcome.output.count("ZeroDivisionError") == 1, outcome
            else:
                assert outcome.output == ""


# The thread prints nothing: Python aborts if a daemon thread is printing while it shuts down.
IN_A_THREAD = """
import threading
def wait():
    try: group.recv(data, 0)
    except shoal.ShoalError: pass
threading.Thread(target=wait, daemon=True).start()
while not shoal.engine.n_waiting(): pass
"""
IN_A_CHILD = """
import multiprocessing, sys
child = multiprocessing.get_context("spawn").Process(target=exec, args=({!r}, {{}}))
child.start()
child.join()
sys.exit(child.exitcode)
"""
FAILING = {
    "idle": ("", "{}", "ended without a goodbye"),
    "in a child of multiprocessing": ("", IN_A_CHILD, "ended without a goodbye"),
    "in a call": ("work = group.recv(data, 0, async_op=True)", "{}", "left the group"),
    "in a call of another thread": (IN_A_THREAD, "{}", "left the group"),
}


@pytest.mark.parametrize("name", FAILING)
@on_ranks(2)
def test_a_rank_whose_program_raises_is_lost_when_its_process_has_ended(name: str) -> None:
    """Otherwise a launcher would see its survivors end first, and blame one of them."""
    code, runner, how = FAILING[name]
    if os.environ["RANK"] == "1":
        program = f"{BEGIN}group = shoal.init(); group.barrier(); {code}\nraise KeyError('boom')"
        command = [sys.executable, "-c", runner.format(program)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, "KeyError: 'boom'\n" in ended.stderr) == (1, True), ended.stderr
        return
    with shoal.init() as group:
        group.barrier()
        assert f"rank 1 on {socket.gethostname()} {how}" in str(error_of(group.barrier))


SLOW_TO_EXIT = f"""
import atexit, sys
atexit.register(sys.stdin.read)  # before shoal's function, so it runs after it
{BEGIN}
group = shoal.init(); group.barrier(); raise KeyError
"""


@on_ranks(2, has_stage=True)
def test_a_failed_program_that_does_not_exit_is_lost_after_five_seconds() -> None:
    stage = Stage.from_environment()
    if os.environ["RANK"] == "1":
        command = [sys.executable, "-c", SLOW_TO_EXIT]
        with subprocess.Popen(command, stdin=-1, stderr=subprocess.DEVNULL) as program:
            stage.await_cue("lost")
            assert program.poll() is None
        return
    with shoal.init() as group:
        group.barrier()
        lost = str(error_of(group.barrier))
        stage.cue("lost")
    assert f"rank 1 on {socket.gethostname()} left the group" in lost


SLOW_TO_SHUT_DOWN = """
import os, time
from shoal import engine
n_before = len(os.listdir("/proc/self/task"))
mesh = engine.Mesh.create(
    rank=0, names=["rank 0"], epoch=1, job_key=bytes(32), arena=engine.Arena.create(1), peers=[],
    n_channels=1, staging_bytes=50 << 20, spin_us=0.0, backstop_s=0.1, listeners=[], resume_s=10.0,
    dead_s=5.0,
)
class Last:
    # Python has cleared the module by then.
    n_left, tasks, pause = n_before + 1, staticmethod(os.listdir), staticmethod(time.sleep)
    def __del__(self):  # while Python shuts down: wait until only shoal-life is left
        while len(self.tasks("/proc/self/task")) > self.n_left:
            self.pause(0.001)
last = Last()
mesh.close_after(0.1)
"""


def test_links_that_are_closed_while_python_shuts_down_do_not_abort_the_process() -> None:
    command = [sys.executable, "-c", SLOW_TO_SHUT_DOWN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def held() -> set[str]:
    """Return the descriptors of this process and its mappings of shared memory."""
    with open("/proc/self/maps") as maps:
        found = {line for line in maps if "shoal" in line and "memfd" in line}
    return found | {f"{fd} {name}" for fd, name in descriptors().items()}


def reduce_until_lost(group: shoal.Group, buffers: list[Callable[[], object]]) -> PeerLost:
    data = np.ones(1 << 20)
    buffers.append(weakref.ref(data))
    try:
        while True:
            group.all_reduce(data)
    except PeerLost as error:
        return error


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_survivors(3, 1)
def test_a_lost_closed_group_holds_no_memory_though_its_error_is_kept(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    gc.collect()
    gc.disable()
    before = held()
    group = shoal.init()
    if group.rank == 1:
        group.all_reduce(np.ones(1 << 20))
        die()
    buffers: list[Callable[[], object]] = []
    lost = reduce_until_lost(group, buffers)
    group.close()
    assert held() - before == set()
    assert str(lost)
    del lost
    assert buffers[0]() is None


SIZE, VICTIM = 4, 1
SLOT_ELEMS = 32 << 10  # 128 KiB of float32: one segment, in a slot of shared memory


def reduce_through_a_stall() -> None:
    """All-reduce until rank 0 ends it."""
    pretend_hosts(2)  # the stalled rank is silent over shared memory and over TCP
    stage = Stage.from_environment()
    go_on = np.ones(1)
    with shoal.init() as group:
        for n_calls in itertools.count():
            data = np.full(N_ELEMS, group.rank + 1, np.float32)
            group.all_reduce(data)
            assert (data == 10).all()
            if n_calls == 0 and group.rank == VICTIM:
                stage.cue("busy")
            go_on[0] = group.rank != 0 or stage.store.try_get("cue/enough") is None
            group.all_reduce(go_on, "min")
            if not go_on[0]:
                return


def test_a_stall_of_three_seconds_is_harmless() -> None:
    with on_stage(reduce_through_a_stall, SIZE) as (stage, ranks):
        stage.await_cue("busy")
        os.kill(ranks.pid(VICTIM), signal.SIGSTOP)
        threading.Event().wait(3)
        os.kill(ranks.pid(VICTIM), signal.SIGCONT)
        stage.cue("enough")
        ranks.values(30)


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
    with on_stage(receive_when_given_up, SIZE) as (stage, ranks):
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
