"""Ranks of different hosts connect at their first exchange.

Native tests of first use, unlinked peers and path makers cover peers that die or leave.
"""

import os

import numpy as np
from process.ranks import FileRanks, on_ranks
from process.stage import Stage, connections, pretend_hosts

import shoal


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
    before = len(connections())
    with shoal.init() as group:
        found = [paths_by_state(group)]
        stage.meet(group.rank, 4, "looked")  # before any other calls, and connects to it
        data = np.full(100_000, group.rank, np.float32)
        group.all_reduce(data)
        assert (data == 6).all()
        stage.meet(group.rank, 4, "done")
        found.append(paths_by_state(group))
        held = len(connections()) - before
        stage.meet(group.rank, 4, "counted")
    return held, found


def test_a_ring_of_four_hosts_connects_each_rank_to_its_two_neighbours_only(
    forked: FileRanks,
) -> None:
    with Stage() as stage:
        results = forked.run(reduce_along_a_ring, 4, env=dict(stage.env))
    for rank, (held, (at_first, afterwards)) in enumerate(results):
        beside, across = sorted([(rank - 1) % 4, (rank + 1) % 4]), (rank + 2) % 4
        assert at_first == {"unmade": [other for other in range(4) if other != rank]}
        assert afterwards == {"open": beside, "unmade": [across]}
        assert held == 2


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
