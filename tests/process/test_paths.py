"""Connections of ranks on different hosts: made at their first exchange, and made again.

Native tests of first use, unlinked peers and path makers cover peers that die or leave.
"""

import os
import socket

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import Stage, connections, pretend_hosts

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


def paths_by_state(group: shoal.Group) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for peer in shoal.dump().state["worlds"][0]["peers"]:
        for path in peer["paths"]:
            found.setdefault(path["state"], []).append(peer["rank"])
    return found


@on_ranks(4, has_stage=True, env={"SHOAL_ALGO": "ring"})
def test_a_ring_of_four_hosts_connects_each_rank_to_its_two_neighbours_only() -> None:
    pretend_hosts(1)
    stage = Stage.from_environment()
    before = len(connections())
    with shoal.init() as group:
        rank = group.rank
        beside, across = sorted([(rank - 1) % 4, (rank + 1) % 4]), (rank + 2) % 4
        assert paths_by_state(group) == {"unmade": [other for other in range(4) if other != rank]}
        stage.meet(rank, 4, "looked")  # before any other calls, and connects to it
        data = np.full(100_000, rank, np.float32)
        group.all_reduce(data)
        assert (data == 6).all()
        stage.meet(rank, 4, "done")
        assert paths_by_state(group) == {"open": beside, "unmade": [across]}
        assert len(connections()) - before == 2
        stage.meet(rank, 4, "counted")


@on_ranks(2)
def test_a_last_message_arrives_though_the_sender_was_not_connected() -> None:
    """Rank 0 closes before any connection exists, because rank 1 dials first."""
    pretend_hosts(1)
    with shoal.init() as group:
        data = np.full(8, 7.0 * (group.rank == 0), np.float32)
        group.send(data, 1) if group.rank == 0 else group.recv(data, 0)
    assert (data == 7).all()
