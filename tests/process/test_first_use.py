"""Ranks of different hosts connect at their first exchange.

Native tests of first use, unlinked peers and path makers cover peers that die or leave.
"""

import os

import numpy as np
from process.ranks import on_ranks
from process.stage import Stage, connections, pretend_hosts

import shoal


def paths_by_state(group: shoal.Group) -> dict[str, list[int]]:
    """The other ranks, by the state of their path."""
    found: dict[str, list[int]] = {}
    for peer in shoal.dump().state["worlds"][0]["peers"]:
        for path in peer["paths"]:
            found.setdefault(path["state"], []).append(peer["rank"])
    return found


@on_ranks(4, has_stage=True)
def test_a_ring_of_four_hosts_connects_each_rank_to_its_two_neighbours_only() -> None:
    pretend_hosts(1)
    os.environ["SHOAL_ALGO"] = "ring"
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
    data = np.full(8, 7.0, np.float32)
    with shoal.init() as group:
        if group.rank == 0:
            group.send(data, 1)
        else:
            data[:] = 0
            group.recv(data, 0)
    assert (data == 7).all()
