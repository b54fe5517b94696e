"""A relay damages bytes between two hosts: no wrong sum, no hang, and a named peer.

The native tests of sealed headers drop, repeat, swap and forge frames on a link, and the tests of
path makers replay handshakes. Here a relay between two real ranks damages the bytes of their first
connection. Rank 0 publishes the relay's port in place of its own; rank 1 connects there at its
first use.
"""

import os
import random
from typing import Any

import numpy as np
import pytest
from process.ranks import Outcome, start_ranks
from process.relay import Fault, Relay
from process.stage import Stage, pretend_hosts

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
