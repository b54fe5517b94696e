"""Several connections between two hosts, and what happens when one of them breaks."""

import os
import signal
import socket
import time

import numpy as np
from process.ranks import run_ranks, start_ranks
from process.stage import Stage, error_of, pretend_hosts, stop

import shoal
from shoal.errors import PeerLost

N_ELEMS = 3_000_000
N_CALLS = 12


def connections() -> list[socket.socket]:
    """The TCP connections of this process, each by a descriptor of its own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the folder's own descriptor
        if sock.family == socket.AF_INET and not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found.append(sock)
        else:
            sock.close()
    return found


def all_reduces_over_two_paths() -> int:
    pretend_hosts(1)
    os.environ.update(SHOAL_PATHS="2", SHOAL_SOCKET_IFNAME="lo")
    with shoal.init() as group:
        data = np.ones(N_ELEMS, np.float32)
        group.all_reduce(data)
        # The dialled end has a port of its own for each; both ends of a path are on loopback.
        paths = connections()
        for turn in range(N_CALLS):
            data[:] = group.rank + turn
            work = group.all_reduce(data, async_op=True)
            if turn == N_CALLS // 2 and group.rank == 0:
                paths[0].shutdown(socket.SHUT_RDWR)
            work.wait()
            assert (data == 1 + 2 * turn).all(), turn
        n_paths = len(paths)
        for path in paths:
            path.close()
        group.barrier()
        return n_paths


def test_a_path_that_breaks_in_the_middle_of_a_call_costs_no_call() -> None:
    assert run_ranks(all_reduces_over_two_paths, 2) == [2, 2]


def all_reduces_over_a_path_that_is_cut(n_cuts: int) -> int:
    pretend_hosts(1)
    with shoal.init() as group:
        data = np.empty(N_ELEMS, np.float32)
        for turn in range(2 * n_cuts):
            data[:] = group.rank + turn
            work = group.all_reduce(data, async_op=True)
            if turn % 2 == 0 and group.rank == turn // 2 % 2:
                for path in connections():
                    path.shutdown(socket.SHUT_RDWR)
                    path.close()
            work.wait()
            assert (data == 1 + 2 * turn).all(), turn
        made = [path for peer in shoal.dump().state["worlds"][0]["peers"] for path in peer["paths"]]
        group.barrier()
        return sum(path["n_made_anew"] for path in made)


def test_the_only_path_that_breaks_in_the_middle_of_calls_costs_no_call() -> None:
    assert min(run_ranks(all_reduces_over_a_path_that_is_cut, 2, 6)) >= 3


def loses_a_peer_that_it_could_not_reach() -> tuple[float, str]:
    """Rank 1 is stopped, cut off, and killed only then: it can be dialled, and does not answer."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    not_ours = {sock.getsockname() for sock in connections()}
    group = shoal.init()
    stage.cue(f"rank {group.rank} is in")
    stage.await_cue("rank 1 is stopped" if group.rank == 0 else "never")
    for path in connections():
        if path.getsockname() not in not_ours:
            path.shutdown(socket.SHUT_RDWR)
        path.close()
    work = group.all_reduce(np.ones(N_ELEMS, np.float32), async_op=True)
    stage.cue("rank 0 is cut off")
    error = error_of(work.wait)
    assert isinstance(error, PeerLost)
    return time.monotonic(), str(error)


def test_a_peer_killed_while_it_could_not_be_reached_is_lost_soon() -> None:
    with Stage() as stage, start_ranks(loses_a_peer_that_it_could_not_reach, 2, env=stage.env) as r:
        for rank in (0, 1):
            stage.await_cue(f"rank {rank} is in")
        stop(r.pid(1))
        stage.cue("rank 1 is stopped")
        stage.await_cue("rank 0 is cut off")
        died_at = time.monotonic()
        os.kill(r.pid(1), signal.SIGKILL)
        lost_at, text = r.wait(30)[0].value
    assert lost_at - died_at < 3.0  # a dial goes out every second, and is refused then
    assert "nobody listens at 127.0.0.1:" in text
