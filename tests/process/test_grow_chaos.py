"""Processes join and are killed at random moments during one job.

Nothing hangs, every sum is right, and no descriptors or memory leak. `SHOAL_SOAK=1` runs a
hundred events in each job, as `make test-soak` does.
"""

import contextlib
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from process.ranks import Outcome, Ranks, free_port, start_ranks
from process.stage import Stage, descriptors

import shoal
from shoal.errors import ShoalError

N_EVENTS = 100 if os.environ.get("SHOAL_SOAK") else 12
N_FIRST, MOST = 4, 7
LONG_S = 50.0
STOP = "stop"


def values(member: int, size: int) -> np.ndarray:
    return np.random.default_rng([member, size]).standard_normal(1003)


def step(group: shoal.Group, own: int) -> list[int]:
    """Make one sum over all members; return the members, by rank."""
    members = np.empty(group.size, np.int64)
    group.all_gather(members, np.array([own]))
    data = values(own, group.size)
    group.all_reduce(data)
    expected = sum(values(member, group.size) for member in members.tolist())
    np.testing.assert_allclose(data, expected, atol=1e-12)
    return list(members.tolist())


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def live(own: int, addresses: str) -> tuple[int, int, float, float]:
    """Be a member until the test ends the job; `own` is unique among all members."""
    os.environ["SHOAL_HOST_ID"] = str(own % 2)
    stage = Stage.from_environment()
    if addresses:
        group = shoal.init(join=addresses, timeout_s=LONG_S)
    else:
        group = shoal.init(timeout_s=LONG_S)
    opened: dict[int, int] = {}
    first_mib = 0.0
    last, longest_s = time.monotonic(), 0.0
    while True:
        try:
            members = step(group, own)
            longest_s = max(longest_s, time.monotonic() - last)
            last = time.monotonic()
            stage.store.set(f"address/{own}", group.address.encode())
            opened.setdefault(group.size, len(descriptors()))
            first_mib = first_mib or resident_mib()
            if group.rank == 0:
                wanted = stage.store.try_get("wanted") or b""
                if wanted.decode().partition(":")[2] == str(sorted(members)):
                    stage.cue(f"reached {wanted.decode()}")
            ends = np.array([stage.store.try_get(STOP) is not None])
            group.all_reduce(ends, "max")
            if ends[0]:
                break
            group = group.grow(timeout_s=LONG_S)
        except ShoalError:
            group = group.reform(timeout_s=LONG_S)
    found = len(descriptors()), opened[group.size], longest_s, resident_mib() - first_mib
    group.barrier()
    group.close()
    return found


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
        self.alive[own] = self.stack.enter_context(start_ranks(live, 1, own, addresses, env=env))
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
            story += [str(outcome) for outcome in outcomes.values() if outcome.value is None]
            sys.stdout.write("\n".join([*story, ""]))
        for outcome in outcomes.values():
            assert outcome.value is not None, outcome
            n_open, n_at_first, longest_s, more_mib = outcome.value
            found = f"{n_open} of {n_at_first} descriptors, {longest_s:.2f} s for a step"
            sys.stdout.write(f"{found}, {more_mib:.1f} MiB more\n")
            assert n_open <= n_at_first + 6  # links that are made at their first use
            assert more_mib < 32
