"""A relay damages bytes between two hosts: no wrong sum, no hang, and a named peer.

A connection that breaks is made again. Native tests of first use, unlinked peers and path makers
cover peers that die or leave, and which peers are connected.

The native tests of sealed headers drop, repeat, swap and forge frames on a link, and the tests of
path makers replay handshakes. Here a relay between two real ranks damages the bytes of their first
connection. Rank 0 publishes the relay's port in place of its own; rank 1 connects there at its
first use.
"""

import os
import random
import socket
from typing import Any

import numpy as np
import pytest
from process.ranks import Outcome, on_ranks, start_ranks
from process.relay import Fault, Relay
from process.stage import Stage, connections, descriptors, pretend_hosts

import shoal
from shoal.errors import PeerLost
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_ELEMS = 300_007
N_CALLS = 6
DEADLINE_S = 40.0
N_HELLO_BYTES = 108  # of the client's handshake, native/transport/handshake.cc
# A call moves 1.2 MB each way: a fault here occurs in the second call.
LATE = 1_500_000


class Detour:
    """A rank's store; rank 0 publishes the relay's port in place of its own."""

    def __init__(self, stage: Stage, relay_port: int) -> None:
        self._stage = stage
        encode = Entry.encode

        def encode_elsewhere(entry: Entry, rank: int) -> bytes:
            if rank == 0:
                (place,) = entry.listens_at
                stage.store.set("relay/port", str(place.port).encode())
                at_relay = Endpoint("127.0.0.1", relay_port, "relay")
                entry = entry._replace(listens_at=(at_relay,))
            return encode(entry, rank)

        Entry.encode = encode_elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.store, name)


FAULTS: dict[str, Fault] = {
    "flips a bit": lambda rest: bytes([rest[0] ^ 8]) + rest[1:],
    "loses bytes": lambda rest: rest[100:] or b"?",
    "repeats bytes": lambda rest: rest[:100] + rest,
    "injects bytes": lambda rest: bytes(64) + rest,
    "cuts": lambda _rest: b"",
}


def reduce_over_relay(relay_port: int) -> tuple[int, Exception | None]:
    """Return the number of right calls and the error that ended them; a wrong sum raises."""
    pretend_hosts(1)
    os.environ["SHOAL_SOCKET_IFNAME"] = "lo"
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    with shoal.init(Detour(stage, relay_port), rank, 2, timeout_s=20) as group:
        places = np.arange(N_ELEMS, dtype=np.float32)
        for turn in range(N_CALLS):
            data = places + rank + turn
            try:
                group.all_reduce(data)
            except shoal.ShoalError as error:
                return turn, error
            assert (data == 2 * places + 1 + 2 * turn).all(), f"wrong sum in call {turn}"
    return N_CALLS, None


def run_through(what: str, at: int) -> list[Outcome]:
    with (
        Stage() as stage,
        Relay(lambda: int(stage.store.get("relay/port", 60.0)), FAULTS[what], at) as relay,
        start_ranks(reduce_over_relay, 2, relay.port, env=stage.env) as ranks,
    ):
        outcomes = ranks.wait(DEADLINE_S)
    for outcome in outcomes:
        assert outcome.value is not None, (what, at, str(outcome))
        n_right, error = outcome.value
        assert (n_right == N_CALLS) == (error is None), (what, at, str(outcome))
        if error is not None:
            assert isinstance(error, PeerLost), (what, at, str(outcome))
            assert error.rank == 1 - outcome.rank, (what, at, str(outcome))
    return outcomes


@pytest.mark.parametrize("what", FAULTS)
def test_a_damaging_relay_causes_no_wrong_sum_and_no_hang(what: str) -> None:
    outcomes = run_through(what, LATE)
    assert all(outcome.value[0] >= 1 for outcome in outcomes), "the relay itself is at fault"


@pytest.mark.skipif(not SOAK, reason="NOT TESTED: minutes; `make test-soak` runs it")
@pytest.mark.timeout(3600)
def test_a_relay_that_damages_any_place_causes_no_wrong_sum_and_no_hang() -> None:
    dice = random.Random(5)
    for what in 64 * list(FAULTS):
        run_through(what, dice.randrange(N_HELLO_BYTES, N_CALLS * 4 * N_ELEMS))


@pytest.mark.parametrize("n_paths", [1, 2])
@on_ranks(2)
def test_breaking_all_paths_in_mid_call_costs_no_call(n_paths: int) -> None:
    pretend_hosts(1)
    os.environ.update(SHOAL_PATHS=str(n_paths), SHOAL_SOCKET_IFNAME="lo")
    with shoal.init() as group:
        data = np.empty(3_000_000, np.float32)
        for turn in range(12):
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


@on_ranks(2)
def test_a_last_message_arrives_though_the_sender_was_not_connected() -> None:
    """Rank 0 closes before any connection exists, because rank 1 dials first."""
    pretend_hosts(1)
    with shoal.init() as group:
        data = np.full(8, 7.0 * (group.rank == 0), np.float32)
        group.send(data, 1) if group.rank == 0 else group.recv(data, 0)
    assert (data == 7).all()


def listening() -> list[str]:
    mine = {target[len("socket:[") : -1] for target in descriptors().values()}
    found = []
    tables = ("tcp", 9, 3, "0A"), ("tcp6", 9, 3, "0A"), ("unix", 6, 3, "00010000")
    for name, inode, column, state in tables:
        if not os.path.exists(f"/proc/net/{name}"):
            continue
        with open(f"/proc/net/{name}", encoding="utf-8") as table:
            rows = [line.split() for line in table][1:]
        found += [" ".join(row) for row in rows if row[inode] in mine and row[column] == state]
    return found


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_ranks_listen_only_across_hosts_and_until_the_group_closes(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        assert len(listening()) == (ranks_per_host == 1)
        group.barrier()
    assert listening() == []
