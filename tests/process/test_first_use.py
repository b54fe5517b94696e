"""Ranks of different hosts connect when they first have to do with each other, and not before."""

import contextlib
import os
import resource
import signal
import socket

import numpy as np
import pytest
from process.ranks import run_ranks, start_ranks
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost


def n_connections() -> int:
    """Of TCP, that this process holds, but for those of the stage."""
    n = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the folder's own descriptor
        with sock:
            is_tcp = sock.family == socket.AF_INET
            n += is_tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return n


def paths_by_state(group: shoal.Group) -> dict[str, list[int]]:
    """The other ranks, by the state of their path."""
    found: dict[str, list[int]] = {}
    for peer in shoal.dump().state["worlds"][0]["peers"]:
        for path in peer["paths"]:
            found.setdefault(path["state"], []).append(peer["rank"])
    return found


def reduce_along_a_ring() -> tuple[int, list[dict[str, list[int]]]]:
    pretend_hosts(1)
    os.environ["SHOAL_ALGO"] = "ring"
    stage = Stage.from_environment()
    before = n_connections()
    with shoal.init() as group:
        found = [paths_by_state(group)]
        stage.cue(f"rank {group.rank} has looked")  # before any other calls, and connects to it
        for rank in range(group.size):
            stage.await_cue(f"rank {rank} has looked")
        data = np.full(100_000, group.rank, np.float32)
        group.all_reduce(data)
        assert (data == 6).all()
        stage.cue(f"rank {group.rank} is done")
        for rank in range(group.size):
            stage.await_cue(f"rank {rank} is done")
        found.append(paths_by_state(group))
        held = n_connections() - before
        stage.cue(f"rank {group.rank} has counted")
        for rank in range(group.size):
            stage.await_cue(f"rank {rank} has counted")
    return held, found


def test_a_ring_of_four_hosts_connects_each_rank_to_its_two_neighbours_only() -> None:
    with Stage() as stage:
        results = run_ranks(reduce_along_a_ring, 4, env=dict(stage.env))
    for rank, (held, (at_first, afterwards)) in enumerate(results):
        beside, across = sorted([(rank - 1) % 4, (rank + 1) % 4]), (rank + 2) % 4
        assert at_first == {"unmade": [other for other in range(4) if other != rank]}
        assert afterwards == {"open": beside, "unmade": [across]}
        assert held == 2


def send_and_leave() -> float:
    """Rank 0 ends before there can be a connection: rank 1 has to dial it first."""
    pretend_hosts(1)
    data = np.full(8, 7.0, np.float32)
    with shoal.init() as group:
        if group.rank == 0:
            group.send(data, 1)
        else:
            data[:] = 0
            group.recv(data, 0)
    return float(data.sum())


def test_what_a_rank_sends_last_arrives_though_it_never_was_connected() -> None:
    assert run_ranks(send_and_leave, 2) == [56.0, 56.0]


def wait_for_one_that_never_came(waits_on: int) -> str | None:
    pretend_hosts(1)
    stage = Stage.from_environment()
    group = shoal.init()
    if group.rank != waits_on:
        stage.cue("in")
        signal.pause()
    stage.await_cue("killed")
    error = error_of(group.recv, np.zeros(4, np.float32), 1 - waits_on)
    assert isinstance(error, PeerLost)
    assert error.rank == 1 - waits_on
    group.close()
    return str(error)


def test_who_only_waits_for_a_rank_that_died_unseen_hears_of_it_at_once() -> None:
    for waits_on in (0, 1):
        with (
            Stage() as stage,
            start_ranks(wait_for_one_that_never_came, 2, waits_on, env=stage.env) as ranks,
        ):
            stage.await_cue("in")
            os.kill(ranks.pid(1 - waits_on), signal.SIGKILL)
            ranks.await_end(1 - waits_on)
            stage.cue("killed")
            text = ranks.wait(30)[waits_on].value
        assert text is not None
        assert f"rank {1 - waits_on} on " in text
        assert "could not be connected to: nobody listens at 127.0.0.1:" in text


def connect_without_descriptors(lacks: int) -> str:
    pretend_hosts(1)
    stage = Stage.from_environment()
    data = np.zeros(4, np.float32)
    with shoal.init() as group, contextlib.ExitStack() as taken:
        if group.rank == lacks:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.enter_context(open("/dev/null", "rb"))
        stage.meet(group.rank, 2, "all descriptors are taken")
        error = error_of(group.all_reduce, data)
        assert isinstance(error, PeerLost)
        stage.meet(group.rank, 2, "both have failed")
    return str(error)


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_rank_without_descriptors_says_so_and_its_peer_says_what_it_met(lacks: int) -> None:
    with Stage() as stage:
        env = {**stage.env, "SHOAL_RESUME_S": "1"}
        texts = run_ranks(connect_without_descriptors, 2, lacks, env=env)
    assert f"rank {lacks} has no file descriptor left (ulimit -n)" in texts[lacks]
    assert "(SHOAL_RESUME_S): Connection reset by peer" in texts[1 - lacks]
