"""A network that drops all packets from one host to another, for a while or for good.

Packets vanish silently, one way or both ways, while ranks all-reduce repeatedly. A cut shorter than
the ranks' patience costs only time; after a longer one the silent rank is lost. `SHOAL_SOAK=1` adds
the long cuts, as `make test-soak` does.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.labs import enter, env_of, needs_root
from process.ranks import Outcome, start_ranks
from process.serving import N_WORKERS, is_right, job_env, new_key, noise
from process.stage import Stage

import shoal
from shoal.errors import PeerLost, ShoalError
from shoal.lab import Lab
from shoal.lab.cluster import INTERFACE

pytestmark = needs_root

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_ELEMS = 300_007
WAYS = {"one way": [(0, 1)], "both ways": [(0, 1), (1, 0)]}
# A peer silent for five seconds counts as dead: a shorter cut is harmless, a longer one ends the
# group, and one of five seconds may do either.
HARMLESS, EITHER, DEADLY = "harmless", "either", "deadly"
FOR_GOOD = float("inf")
CUTS = [("one way", 1, HARMLESS), ("both ways", 1, HARMLESS), ("one way", FOR_GOOD, DEADLY)]
if SOAK:
    CUTS += [(way, 5, EITHER) for way in WAYS] + [(way, 30, DEADLY) for way in WAYS]


def reduce_through_a_cut(namespaces: list[str]) -> tuple[int, Exception | None]:
    """All-reduce until a cue or an error; return the number of right calls and the error."""
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    stage.cue(f"rank {rank} is here")  # connects, which a host of the cluster cannot do
    enter(namespaces[rank])
    n_calls = 0
    with shoal.init() as group:
        try:
            go_on = np.ones(1)
            while go_on[0]:
                data = np.full(N_ELEMS, rank + n_calls, np.float32)
                group.all_reduce(data)
                assert (data == 1 + 2 * n_calls).all(), f"wrong sum in call {n_calls}"
                n_calls += 1
                if n_calls == 3:
                    stage.cue(f"rank {rank} is busy")
                go_on[0] = rank != 0 or stage.store.try_get("cue/enough") is None
                group.all_reduce(go_on, "min")
        except ShoalError as error:
            return n_calls, error
    return n_calls, None


def run_through(ways: list[tuple[int, int]], cut_s: float) -> list[Outcome]:
    """Run a rank on each of two hosts, and cut these ways once both are busy."""
    with Lab(2) as cluster, Stage() as stage:
        namespaces = [host.namespace for host in cluster.hosts]
        env = {**env_of(cluster), **stage.env, "SHOAL_RESUME_S": "3"}
        with start_ranks(reduce_through_a_cut, 2, namespaces, env=env) as ranks:
            for rank in range(2):
                stage.await_cue(f"rank {rank} is busy")
            for source, to in ways:
                cluster.cut(source, to)
            if cut_s == FOR_GOOD:
                return ranks.wait(60)
            threading.Event().wait(cut_s)  # a silence needs real time
            for source, to in ways:
                cluster.heal(source, to)
            stage.cue("enough")
            return ranks.wait(30)


@pytest.mark.parametrize(("way", "cut_s", "meaning"), CUTS)
def test_only_a_long_silence_of_the_network_fails(way: str, cut_s: float, meaning: str) -> None:
    outcomes = run_through(WAYS[way], cut_s)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        n_calls, error = outcome.value
        assert n_calls >= 3, outcome
        if error is not None:
            assert isinstance(error, PeerLost), outcome
            assert error.rank == 1 - outcome.rank, outcome
        assert meaning == EITHER or (error is None) == (meaning == HARMLESS), outcome
    assert len({outcome.value[1] is None for outcome in outcomes}) == 1


# A cut between one worker and one server; all other ranks reach both.


SERVERS = (N_WORKERS, N_WORKERS + 1)  # hosts
# A call waits 1.2 s for a server whose host confirms nothing, and then until others have answered;
# it was 12 s while the connection had to be lost for good first.
MOST_S = 6.0


def servers_of(group: shoal.Group) -> list[str]:
    pool: Any = group.pool  # type: ignore[attr-defined]
    return [] if pool.view is None else [address.host for address in pool.view.servers]


def call_through_a_cut(namespaces: list[str], addresses: list[str]) -> None:
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    stage.cue(f"rank {rank} is here")  # connects, which a host of the cluster cannot do
    enter(namespaces[rank])
    with shoal.init(timeout_s=60.0) as group:
        for number, wanted in enumerate((addresses, addresses[:1], addresses)):
            while True:
                data = noise(group.rank, number)
                begun = time.monotonic()
                group.all_reduce(data)
                assert time.monotonic() - begun < MOST_S
                assert is_right(data, number)
                there = bytearray([servers_of(group) == wanted])
                group.all_reduce(there, "min")
                if there[0]:
                    break
            sys.stderr.write(f"stage {number}\n")
            stage.cue(f"rank {rank} has stage {number}")
            stage.await_cue(f"stage {number + 1}")


@contextlib.contextmanager
def serving(cluster: Lab, key: Path, addresses: list[str]) -> Iterator[None]:
    argv = [sys.executable, "-m", "shoal", "server", "--key-file", str(key), "--listen"]
    env = {**os.environ, "SHOAL_LINK": "29Mb,10us,1us", "SHOAL_SOCKET_IFNAME": INTERFACE}
    servers = [
        cluster.popen(host, [*argv, address], stderr=subprocess.PIPE, env=env)
        for host, address in zip(SERVERS, addresses, strict=True)
    ]
    try:
        for server in servers:
            assert "serving 1 key" in server.stderr.readline()  # or they count as absent
        yield
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_a_server_that_a_worker_cannot_reach_is_soon_excluded_and_returns(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Lab(N_WORKERS + len(SERVERS), rate_mbit=None) as cluster, Stage() as stage:
        addresses = [cluster.hosts[host].address for host in SERVERS]
        env = job_env(key, *addresses, SHOAL_DEBUG="INFO") | env_of(cluster) | stage.env
        namespaces = [host.namespace for host in cluster.hosts[:N_WORKERS]]
        worker, server = N_WORKERS - 1, SERVERS[1]
        with (
            serving(cluster, key, addresses),
            start_ranks(call_through_a_cut, N_WORKERS, namespaces, addresses, env=env) as ranks,
        ):
            for number, change in enumerate((cluster.cut, cluster.heal, None)):
                for rank in range(N_WORKERS):
                    stage.await_cue(f"rank {rank} has stage {number}")
                if change is not None:
                    change(worker, server)
                    change(server, worker)
                stage.cue(f"stage {number + 1}")
            outcomes = ranks.wait()
    assert not any(one.error or one.died for one in outcomes), outcomes
    # Before the cut a server that was slow to start may have been left out too.
    lines = outcomes[0].output.partition("stage 0\n")[2].splitlines()
    texts = [line for line in lines if f"server {addresses[1]}" in line]
    assert len(texts) == 2, outcomes[0]
    assert "is not used: it is cut off" in texts[0]
    assert f"between rank {worker} (" in texts[0]
    assert "is used again, after" in texts[1]
