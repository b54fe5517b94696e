"""Several connections between two hosts, and what happens when one of them breaks."""

import os
import socket

import numpy as np
from process.ranks import run_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import UsageError

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
        # The dialled end has a port of its own for each; both ends of a path are on loopback.
        paths = connections()
        data = np.empty(N_ELEMS, np.float32)
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


def joins_with_a_wrong_number() -> str:
    pretend_hosts(1)
    os.environ["SHOAL_PATHS"] = "9"
    error = error_of(shoal.init)
    assert isinstance(error, UsageError)
    return str(error)


def test_a_wrong_number_of_paths_is_refused_by_name() -> None:
    for text in run_ranks(joins_with_a_wrong_number, 2):
        assert "SHOAL_PATHS='9' is not a number from 1 to 8" in text
