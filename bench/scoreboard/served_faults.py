"""The longest pause of a step while servers die, stop, leave and join."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.scoreboard.pools import slowest_of
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.lab_servers import LabServers
    from bench.scoreboard.pools import WorkerPools

Disturb = Callable[["LabServers", threading.Event], int]
"""Disturbs servers until the event; returns the number of disturbances once all servers run."""

LIBRARY: Final = "served"
# The time from a server's kill to its restart: it misses a view or two.
_AWAY_S: Final = 1.0
_AFTER_S: Final = 3.0  # from the first step to a single disturbance
_USED_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 10.0


def kill_every(seconds: float) -> Disturb:
    """Return a disturbance that kills one server after another, and restarts each 1 s later."""

    def disturb(servers: LabServers, over: threading.Event) -> int:
        n_killed = 0
        while not over.wait(seconds - _AWAY_S):
            servers.kill(n_killed % servers.n)
            time.sleep(_AWAY_S)
            servers.start(n_killed % servers.n)
            n_killed += 1
        return n_killed

    return disturb


def freeze_one(servers: LabServers, over: threading.Event) -> int:
    """Stop the first server (SIGSTOP); at the end kill it and start it again."""
    if over.wait(_AFTER_S):
        return 0
    servers.freeze(0)
    over.wait()
    servers.kill(0)
    servers.start(0)
    return 1


def drain_one(servers: LabServers, over: threading.Event) -> int:
    """Drain the first server (SIGTERM); at the end start it again."""
    if over.wait(_AFTER_S):
        return 0
    servers.drain(0)
    over.wait()
    servers.start(0)
    return 1


def join_one(servers: LabServers, over: threading.Event) -> int:
    """Start the first server late."""
    servers.kill(0)
    is_over = over.wait(_AFTER_S)
    servers.start(0)
    over.wait()
    return int(not is_over)


class Pauses(NamedTuple):
    """The slowest step's seconds beyond the median, and the numbers of steps and faults."""

    longest_s: float
    n_steps: int
    n_done: int


def pauses(disturb: Disturb, for_s: float, pools: WorkerPools, case: Case) -> Pauses:
    """Measure steps during faults of servers.

    Args:
        for_s: the duration of the steps.

    Raises:
        Failure: a step failed, or was wrong; or no server was disturbed.
    """
    pools.ask(LIBRARY, case, "steps", n_bytes=case.n_bytes, seconds=1.0)
    over = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        disturbing = beside.submit(disturb, pools.servers(case), over)
        try:
            ranks = pools.ask(LIBRARY, case, "steps", n_bytes=case.n_bytes, seconds=for_s)
        finally:
            over.set()
            n_done = _result_of(disturbing)
    slowest = slowest_of(ranks)
    if n_wrong := max(rank["n_wrong"] for rank in ranks):
        raise Failure(f"WRONG RESULT of {n_wrong} of {len(slowest)} steps")
    if not n_done:
        raise Failure("the steps were over before anything was done to a server")
    return Pauses(max(slowest) - statistics.median(slowest), len(slowest), n_done)


def _result_of(disturbing: Future[int]) -> int:
    """Wait for a disturbance that runs while ranks work; Failure if it failed."""
    try:
        return disturbing.result()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise Failure(f"disturbing the servers failed: {what}") from error


def restart_to_first_use(n_restarts: int) -> Measure:
    """Measure the seconds from a server's start until calls reach it; the median.

    Calls have reached it when its host has received 1 MiB.
    """

    def measure(pools: WorkerPools, case: Case) -> float:
        servers = pools.servers(case)
        times_s: list[float] = []

        def restart() -> int:
            for _ in range(n_restarts):
                time.sleep(_AWAY_S)
                servers.kill(0)
                time.sleep(_AWAY_S)
                times_s.append(_start_to_use(servers))
            return len(times_s)

        pools.ask(LIBRARY, case, "steps", n_bytes=case.n_bytes, seconds=1.0)
        with ThreadPoolExecutor(1) as beside:
            restarting = beside.submit(restart)
            try:
                seconds = n_restarts * (2 * _AWAY_S + 2.0)
                pools.ask(LIBRARY, case, "steps", n_bytes=case.n_bytes, seconds=seconds)
            finally:
                _result_of(restarting)
        return statistics.median(times_s)

    return measure


def _start_to_use(servers: LabServers) -> float:
    start_s = time.monotonic()
    servers.start(0)
    before = servers.received_bytes(0)
    while servers.received_bytes(0) - before < _USED_BYTES:
        if time.monotonic() - start_s > _PATIENCE_S:
            raise Failure(f"a started server had no part in calls for {_PATIENCE_S:g} s")
        time.sleep(0.005)
    return time.monotonic() - start_s
