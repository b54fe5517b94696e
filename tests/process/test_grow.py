"""A running group admits newcomers, and survives deaths meanwhile.

In random jobs nothing hangs, every sum is right, and no descriptors or memory leak. `SHOAL_SOAK=1`
runs a hundred events in each of them, as `make test-soak` does.
"""

import contextlib
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.arrays import check_sum
from process.ranks import FileRanks, Outcome, Ranks, free_port, on_ranks, run_ranks, start_ranks
from process.serving import await_that
from process.stage import Lines, Stage, await_stop, descriptors, error_of, on_stage, pretend_hosts

import shoal
from shoal.errors import Closed, ShoalError, UsageError
from shoal.group import entering, growing
from shoal.rendezvous.listener import hold_port, listen_tcp, port_range
from shoal.rendezvous.meeting import Meeting

LONG_S = 50.0
N_TURNS = 50


def texts_of_newcomers() -> Any:
    """Return two doors, the newcomers' errors there and their warnings, which come early."""
    entering.SILENT_S, entering._WARN_S = 0.1, 0.6
    with shoal.init() as group, hold_port() as held, ThreadPoolExecutor(2) as both:
        lines = Lines(logging.WARNING)
        doors = f"127.0.0.1:{held.getsockname()[1]}", group.address
        found = both.map(lambda door: error_of(shoal.init, join=door, timeout_s=4.0), doors)
        return *doors, *map(str, found), lines.texts


def test_a_newcomer_that_is_never_admitted_names_the_address_and_the_cause() -> None:
    ((nowhere, door, refused, waited, texts),) = run_ranks(texts_of_newcomers, 1)
    assert f"no shoal process answered at {nowhere} ([Errno 111] Connection refused)" in refused
    assert f"the members did not call grow while it waited at {door}" in waited
    for text in (refused, waited):
        assert text.count("timed out") == 1
        assert "rank 0" not in text
        assert "MASTER_" not in text
    for cause in (f"no shoal process answered at {nowhere} (", f"at {door} have not called grow"):
        warnings = [text for text in texts if cause in text]
        assert 1 <= len(warnings) <= 3  # at doubling intervals
        assert all("to be let into the group 'world': " in text for text in warnings)


@on_ranks(2)
def test_a_rank_that_cannot_listen_logs_why_once() -> None:
    pretend_hosts(1)
    lines = Lines(logging.WARNING, "cannot listen for newcomers")
    with shoal.init() as group:
        for _ in range(3):
            assert group.grow() is group
        group.barrier()
    (text,) = lines.texts
    assert "SHOAL_KEY_FILE" in text


N_PORTS = 8


def member_in_a_range() -> int:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=LONG_S) as first:
        assert int(first.address.rpartition(":")[2]) in port_range(os.environ)
        first.barrier()
        if first.rank == 0:
            stage.cue("the doors are open")
        group = first
        while group.size == 2:
            group = group.grow()
        check_sum(group)
        return group.size


def newcomer_of_a_range() -> int:
    Stage.from_environment().await_cue("the doors are open")
    ports = port_range(os.environ)
    with shoal.init(join=",".join(f"127.0.0.1:{port}" for port in ports)) as group:
        check_sum(group)
        return group.size


def test_a_newcomer_that_knows_only_a_port_range_finds_a_door() -> None:
    # Below the kernel's ephemeral ports and the ports of `free_port`. The first belongs to another
    # program.
    with listen_tcp("127.0.0.1", range(random.randrange(14_000, 18_000), 18_900)) as taken:
        first = taken.getsockname()[1]
        ports = {"SHOAL_PORT_RANGE": f"{first}-{first + N_PORTS}", "SHOAL_KEY": "k" * 32}
        with on_stage(member_in_a_range, 2, env=ports) as (stage, ranks):
            env = {**stage.env, **ports, "RANK": "2"}
            assert [*run_ranks(newcomer_of_a_range, 1, env=env), *ranks.values()] == [3, 3, 3]


# By the name of a state: the function that is called in it.
LATE = "asks for a place"
NEWCOMER_STATES: dict[str, tuple[Any, str]] = {
    "announced": (entering, "decode_answer"),
    "invited": (entering, "visit"),
    LATE: (entering, "take_place"),
    "here": (growing, "_await_size"),
    "placed": (entering, "form"),
    "publishes": (Meeting, "publish"),
    "has formed": (shoal.Group, "barrier"),
}
MEMBER_STATES: dict[str, tuple[Any, str]] = {
    "has agreed": (growing, "form_new"),
    "has opened": (growing, "visit"),
    "has the size": (growing, "form"),
    "publishes": (Meeting, "publish"),
    "votes": (shoal.Group, "_vote"),
    "has voted": (shoal.Group, "_move_to"),
    "moves": (shoal.Group, "barrier"),
}
INTERRUPTED_STATES: dict[str, tuple[Any, str]] = MEMBER_STATES | {
    "leaves": (shoal.Group, "close"),
    "has moved": (shoal.Group, "begin_again"),
    "has grown": (shoal.Group, "grow"),  # after it
}
MEETING_S = 15.0  # a limit; a process that waits for a lost one takes this long


def end_in(state: str, stage: Stage, number: int = signal.SIGKILL) -> None:
    """Make this process send itself a signal when it calls the function of this state."""
    owner, name = (NEWCOMER_STATES | INTERRUPTED_STATES)[state]
    whole = getattr(owner, name)

    def end(*args: Any, **how: Any) -> Any:
        grown = whole(*args, **how) if state == "has grown" else None
        if grown is None or grown is not args[0]:
            setattr(owner, name, whole)  # Ctrl-C once
            stage.cue("its end has come")
            os.kill(os.getpid(), number)
        return whole(*args, **how) if grown is None else grown

    setattr(owner, name, end)


def live(group: shoal.Group, stage: Stage, size: int) -> tuple[int, int, int]:
    """Go on until the group has this size, and the victim has been signalled.

    Returns:
        This process's rank, the size, and the number of errors.
    """
    n_errors = 0
    while True:
        try:
            check_sum(group)
            is_over = np.array([stage.store.try_get("cue/its end has come") is not None])
            group.all_reduce(is_over, "max")
            if group.rank == 0:
                stage.cue(f"size {group.size}")
            if group.size == size and is_over[0]:
                break
            time.sleep(0.005)  # the computing of a step: calls alone would fill all cores
            group = group.grow(timeout_s=LONG_S)
        except (ShoalError, KeyboardInterrupt):
            n_errors += 1
            group = group.reform(timeout_s=LONG_S)
    group.barrier()
    group.close()
    return group.rank, group.size, n_errors


def take_part(
    n_members: int,
    size: int,
    victim: int,
    state: str,
    number: int = signal.SIGKILL,
    absent: int = -1,
) -> tuple[int, int, int]:
    """Be a member or, after these, a newcomer; the victim gets a signal in this state.

    Args:
        absent: a rank of the job outside the ranks of this file, or -1.
    """
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    if 0 <= absent <= rank:
        rank += 1
    if rank < n_members:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(n_members))
        group = shoal.init(timeout_s=LONG_S)
        stage.store.set(f"address/{rank}", group.address.encode())
        meets_all = victim < 0 or state == LATE
        while rank == 0 and meets_all and len(group.newcomers) < size - n_members:
            os.sched_yield()
        group.barrier()
        if rank == victim:
            end_in(state, stage, number)
    else:
        doors = [stage.store.get(f"address/{one}", LONG_S).decode() for one in range(n_members)]
        if rank == victim:
            end_in(state, stage, number)
        group = shoal.init(join=",".join(doors), timeout_s=LONG_S)
    return live(group, stage, size)


LAST = 4  # a newcomer
ENDS = [
    *((LAST, state, signal.SIGKILL) for state in NEWCOMER_STATES),
    *((victim, state, signal.SIGKILL) for victim in (0, 1) for state in MEMBER_STATES),
    *((LAST, state, signal.SIGSTOP) for state in ("announced", "here", "placed", "publishes")),
    *((0, state, signal.SIGSTOP) for state in ("has opened", "publishes")),
    (1, "votes", signal.SIGSTOP),
]


@pytest.mark.parametrize(("victim", "state", "ending"), ENDS)
def test_a_rank_that_dies_or_stops_while_the_group_grows_is_left_out_of_it(
    victim: int, state: str, ending: signal.Signals, forked: FileRanks
) -> None:
    """Three members admit two newcomers, and one of the five is the victim."""
    with Stage() as stage:
        env = {**stage.env, "MASTER_PORT": str(free_port())}
        given = 3, 4, victim, state, ending
        with start_ranks(take_part, 1, *given, env=env | {"RANK": str(victim)}) as ended:
            found = forked.run(take_part, 4, *given, victim, env=env)
            if ending == signal.SIGSTOP:
                os.kill(ended.pid(0), signal.SIGKILL)
            assert ended.wait(60)[0].died == "was killed by SIGKILL"
    n_members = 3 if victim == LAST else 2
    places = [place for *place, _ in found]
    assert places[:n_members] == [[rank, 4] for rank in range(n_members)]
    assert sorted(places) == [[rank, 4] for rank in range(4)]


def await_a_newcomer_that_ends() -> float:
    """Return how long `grow` took for a newcomer that ended before it reached the meeting."""
    stage, group = Stage.from_environment(), shoal.init(timeout_s=LONG_S)
    stage.store.set(f"address/{group.rank}", group.address.encode())
    if group.rank == 1:
        while not group.newcomers:
            os.sched_yield()
    group.barrier()
    began = time.monotonic()
    assert group.grow(timeout_s=LONG_S).size == 2
    return time.monotonic() - began


def end_once_invited() -> None:
    stage = Stage.from_environment()
    end_in("invited", stage)
    shoal.init(join=stage.store.get("address/1", LONG_S).decode(), timeout_s=LONG_S)


def test_members_do_not_wait_for_a_newcomer_that_ends_before_the_meeting() -> None:
    with (
        Stage() as stage,
        start_ranks(await_a_newcomer_that_ends, 2, env=stage.env) as ranks,
        start_ranks(end_once_invited, 1, env=stage.env) as dying,
    ):
        assert dying.wait(60)[0].died == "was killed by SIGKILL"
        took_s = ranks.values()
    assert max(took_s) < 2, took_s


def test_two_newcomers_at_once_get_the_ranks_after_the_members(forked: FileRanks) -> None:
    with Stage() as stage:
        stage.cue("its end has come")
        found = forked.run(take_part, 5, 3, 5, -1, "", env=stage.env)
    assert found[:3] == [(0, 5, 0), (1, 5, 0), (2, 5, 0)]
    assert sorted(found[3:]) == [(3, 5, 0), (4, 5, 0)]


@pytest.mark.parametrize("state", INTERRUPTED_STATES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_interrupted_while_the_group_grows_delays_no_other(
    victim: int, state: str, forked: FileRanks
) -> None:
    with Stage() as stage:
        found = forked.run(take_part, 4, 3, 4, victim, state, signal.SIGINT, env=stage.env)
        interrupted_s = stage.await_cue("its end has come")
    assert [place for *place, _ in found] == [[rank, 4] for rank in range(4)]
    assert time.monotonic() - interrupted_s < MEETING_S
    n_errors = [n for *_, n in found]
    assert n_errors[victim] > 0
    if state == "has grown":  # the others are far ahead
        assert sum(n_errors) == n_errors[victim] == 1


def test_a_newcomer_late_for_a_meeting_joins_the_next_and_does_not_affect_the_others() -> None:
    """Two newcomers are invited, and the late one stops before it asks for its place."""
    given = 3, 5, LAST, LATE, signal.SIGSTOP
    with Stage() as stage, start_ranks(take_part, 4, *given, env=stage.env) as ranks:
        late = start_ranks(take_part, 1, *given, env={**stage.env, "RANK": str(LAST)})
        with late:
            stage.await_cue("size 4")
            await_stop(late.pid(0))
            os.kill(late.pid(0), signal.SIGCONT)
            found = [*ranks.values(), *late.values()]
    assert found == [(rank, 5, 0) for rank in range(5)]


@on_ranks(2, has_stage=True)
def test_a_group_of_one_goes_on_after_an_interrupt() -> None:
    if os.environ["RANK"] == "1":
        assert take_part(1, 2, -1, "") == (1, 2, 0)
        return
    stage = Stage.from_environment()
    os.environ["WORLD_SIZE"] = "1"
    first = shoal.init(timeout_s=LONG_S)
    stage.store.set("address/0", first.address.encode())
    while not first.newcomers:
        os.sched_yield()
    end_in("has the size", stage, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        first.grow()
    group = first.reform()
    check_sum(group)
    assert live(group, stage, 2) == (0, 2, 0)


def refused(name: str, version: str) -> str:
    address = Stage.from_environment().store.get("address", LONG_S).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal, "__version__", version)
        return str(error_of(entering.enter, [address], timeout_s=LONG_S, name=name))


# The newcomer's environment, group and version, and text of its error.
OWN = "world", shoal.__version__
REFUSALS = [
    ({"SHOAL_KEY": "another key of 32 characters ..."}, *OWN, "holds another key"),
    ({"SHOAL_ALGO": "ring"}, *OWN, "its SHOAL_ALGO differs from the group's"),
    ({"SHOAL_WIRE": "bf16"}, *OWN, "its the wire of the group"),
    ({}, "another", OWN[1], "it asks for the group 'another', and the group is 'world'"),
    ({}, "world", "9.9", f"it runs shoal 9.9, and the group runs {OWN[1]}"),
]


def refusing() -> None:
    stage = Stage.from_environment()
    with shoal.init() as group:
        stage.store.set("address", group.address.encode())
        stage.await_cue("all were refused")
        assert group.newcomers == ()
        assert group.grow() is group
        check_sum(group)


def test_an_incompatible_newcomer_is_refused_with_the_reason(forked: FileRanks) -> None:
    key = {"SHOAL_KEY": "k" * 32}
    with on_stage(refusing, 1, env=key) as (stage, ranks):
        for change, name, version, text in REFUSALS:
            [found] = forked.run(refused, 1, name, version, env={**stage.env, **key, **change})
            assert text in found, found
        stage.cue("all were refused")
        ranks.values()


def grow_often() -> None:
    """Grow fifty times on rank 0; each newcomer leaves properly."""
    stage, group, n_open = Stage.from_environment(), shoal.init(), []
    first = group
    for turn in range(N_TURNS):
        stage.store.set("address", group.address.encode())
        stage.cue(f"turn {turn}")
        while group.size == 1:
            group = group.grow()
        check_sum(group, turn)
        while group.size == 2:
            if error_of(group.barrier) is not None:
                group = group.reform()
        n_open.append(len(descriptors()))
    # A connection of the last newcomer may still be closing.
    await_that(lambda: len(descriptors()) <= max(n_open[:5]), f"no descriptor more in {n_open}")
    assert first.__class__ is group.__class__
    door = group._door
    assert door is not None
    assert len(door._doorman._values) < 100
    assert not door._doorman._ids
    before_close = len(descriptors())
    group.close()
    assert len(descriptors()) < before_close
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal store"]


def join_often() -> None:
    stage = Stage.from_environment()
    for turn in range(N_TURNS):
        stage.await_cue(f"turn {turn}")
        os.environ["SHOAL_JOIN"] = stage.store.get("address", LONG_S).decode()
        with shoal.init() as group:
            assert (group.rank, group.size) == (1, 2)
            check_sum(group, turn)


def test_growing_fifty_times_leaks_no_descriptor_thread_or_value() -> None:
    with Stage() as stage, start_ranks(grow_often, 1, env=stage.env) as ranks:
        run_ranks(join_often, 1, env=stage.env)
        ranks.values()


@on_ranks(2)
def test_wrong_uses_are_errors_that_name_the_remedy() -> None:
    pretend_hosts(1)
    with shoal.init() as group:
        error = error_of(lambda: group.address)
        assert isinstance(error, UsageError)
        assert "only with a job key" in str(error)
        part = group.subgroup(range(group.size), "part")
        for wrong in (part.grow, lambda: part.address, lambda: part.newcomers):
            assert "only the group that init returned can grow" in str(error_of(wrong))
        assert group.grow() is group  # nobody waits
        group.barrier()
    for arguments in ({"join": "x:1", "rank": 0}, {"join": "nowhere"}, {"join": "x:99999"}):
        assert isinstance(error_of(shoal.init, **arguments), UsageError)
    os.environ.pop("MASTER_ADDR")
    assert "MASTER_ADDR" in str(error_of(shoal.init, join="1"))
    assert isinstance(error_of(group.grow), Closed)
    assert isinstance(error_of(group.reform), Closed)


# Processes join and are killed at random moments during one job.


N_EVENTS = 100 if os.environ.get("SHOAL_SOAK") else 12
N_FIRST, MOST = 4, 7
STOP = "stop"


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def be_there(own: int, addresses: str) -> None:
    """Be a member until the test ends the job; `own` is unique among all members."""
    os.environ["SHOAL_HOST_ID"] = str(own % 2)
    stage = Stage.from_environment()
    if addresses:
        group = shoal.init(join=addresses, timeout_s=LONG_S)
    else:
        group = shoal.init(timeout_s=LONG_S)
    opened: dict[int, int] = {}
    first_mib = 0.0
    while True:
        try:
            members = np.empty(group.size, np.int64)
            group.all_gather(members, np.array([own]))
            check_sum(group, group.size)
            stage.store.set(f"address/{own}", group.address.encode())
            opened.setdefault(group.size, len(descriptors()))
            first_mib = first_mib or resident_mib()
            if group.rank == 0:
                wanted = stage.store.try_get("wanted") or b""
                if wanted.decode().partition(":")[2] == str(sorted(members.tolist())):
                    stage.cue(f"reached {wanted.decode()}")
            ends = np.array([stage.store.try_get(STOP) is not None])
            group.all_reduce(ends, "max")
            if ends[0]:
                break
            group = group.grow(timeout_s=LONG_S)
        except ShoalError:
            group = group.reform(timeout_s=LONG_S)
    # A few links are made at their first use.
    n_open, more_mib = len(descriptors()), resident_mib() - first_mib
    assert n_open <= opened[group.size] + 6, (n_open, opened)
    assert more_mib < 32
    group.barrier()
    group.close()


class Job:
    """The processes of one job, which a seed starts and kills."""

    def __init__(self, seed: int, stage: Stage, stack: contextlib.ExitStack) -> None:
        self.random = random.Random(seed)
        self.stage, self.stack = stage, stack
        self.alive: dict[int, Ranks] = {}
        self.dead: list[Ranks] = []
        self.n_started = 0
        port = str(free_port())
        for rank in range(N_FIRST):
            place = {"RANK": str(rank), "WORLD_SIZE": str(N_FIRST), "MASTER_PORT": port}
            self.start("", place)

    def start(self, addresses: str, place: dict[str, str]) -> int:
        own = self.n_started
        self.n_started += 1
        env = {**self.stage.env, "SHOAL_KEY": "k" * 32, **place}
        self.alive[own] = self.stack.enter_context(
            start_ranks(be_there, 1, own, addresses, env=env)
        )
        return own

    def start_newcomer(self) -> int:
        known = [self.stage.store.get(f"address/{one}", LONG_S).decode() for one in self.members()]
        self.random.shuffle(known)
        return self.start(",".join(known), {})

    def members(self) -> list[int]:
        return sorted(self.alive)

    def kill(self, own: int) -> None:
        ranks = self.alive.pop(own)
        os.kill(ranks.pid(0), signal.SIGKILL)
        self.dead.append(ranks)

    def await_members(self, event: int) -> None:
        """Wait until exactly the living processes have made a step together."""
        wanted = f"{event}:{self.members()}"
        self.stage.store.set("wanted", wanted.encode())
        self.stage.await_cue(f"reached {wanted}", LONG_S)

    def happen(self) -> str:
        """Start and kill processes at random moments."""
        known = self.members()
        n_come = self.random.choice([0, 1, 1, 2]) if len(known) < MOST else 0
        come = [self.start_newcomer() for _ in range(n_come)]
        n_killed = min(self.random.choice([0, 1, 1, 2]), max(0, len(known) - 2))
        victims = self.random.sample(known, n_killed)
        if come and self.random.random() < 0.4:
            victims.append(self.random.choice(come))
        for victim in victims:
            # Any moment is wanted here, so no cue is awaited.
            threading.Event().wait(self.random.choice([0.0, 0.02, 0.1, 0.3]) * self.random.random())
            self.kill(victim)
        return f"{come} came, {victims} were killed"

    def end(self) -> dict[int, Outcome]:
        """Stop the job; return the outcomes of the living processes."""
        self.stage.store.set(STOP, b"")
        outcomes = {own: ranks.wait(LONG_S)[0] for own, ranks in self.alive.items()}
        for ranks in self.dead:
            ranks.wait(LONG_S)
        return outcomes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3] if N_EVENTS > 12 else [1])
def test_random_joins_and_deaths_leave_a_group_of_all_living_ranks(seed: int) -> None:
    story: list[str] = []
    with Stage() as stage, contextlib.ExitStack() as stack:
        job = Job(seed, stage, stack)
        try:
            job.await_members(-1)
            for event in range(N_EVENTS):
                story.append(job.happen())
                job.await_members(event)
        finally:
            outcomes = job.end()
            story += map(str, outcomes.values())
            sys.stdout.write("\n".join([*story, ""]))
        assert not any(outcome.error or outcome.died for outcome in outcomes.values())
