"""Several connections between two hosts, some of which break."""

import os
import socket

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import connections, pretend_hosts

import shoal

N_ELEMS = 3_000_000
N_CUTS = 6


@pytest.mark.parametrize("n_paths", [1, 2])
@on_ranks(2)
def test_breaking_all_paths_in_mid_call_costs_no_call(n_paths: int) -> None:
    pretend_hosts(1)
    os.environ.update(SHOAL_PATHS=str(n_paths), SHOAL_SOCKET_IFNAME="lo")
    with shoal.init() as group:
        data = np.empty(N_ELEMS, np.float32)
        for turn in range(2 * N_CUTS):
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
        assert sum(path["n_reconnects"] for path in made) >= 3
