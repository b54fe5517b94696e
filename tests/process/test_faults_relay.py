"""A relay damages bytes between two hosts: no wrong sum, no hang, and a named peer.

The native tests of sealed headers drop, repeat, swap and forge frames on a link, and the tests of
path makers replay handshakes. Here a relay between two real ranks damages the bytes of their first
connection. Rank 0 publishes the relay's port in place of its own; rank 1 connects there at its
first use.
"""

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from process.ranks import Outcome, start_ranks
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

Fault = Callable[[bytes], bytes]


class Detour:
    """A rank's store; rank 0 publishes the relay's port in place of its own."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        encode = Entry.encode

        def encode_elsewhere(entry: Entry, rank: int) -> bytes:
            if rank == 0:
                (place,) = entry.listens_at
                stage.store.set("relay/port", str(place.port).encode())
                port = int(stage.store.get("relay/own", 60.0))
                entry = entry._replace(listens_at=(Endpoint("127.0.0.1", port, "relay"),))
            return encode(entry, rank)

        Entry.encode = encode_elsewhere  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.store, name)


class Relay:
    """Forwards connections, and damages one byte that rank 1 sends over the first."""

    def __init__(self, stage: Stage, fault: Fault, at: int) -> None:
        self._stage = Stage(stage.port)  # not a shared thread, which is busy while the test waits
        self._fault = [(fault, at)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        stage.store.set("relay/own", str(self._listener.getsockname()[1]).encode())
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                port = int(self._stage.store.get("relay/port", 60.0))
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # rank 0 has ended
                    near.close()
                    continue
                self._open += [near, far]
                data = _read(near)
                if self._fault:
                    data = _damage(data, *self._fault.pop())
                for way in ((near, far, data), (far, near, _read(far))):
                    self._threads.append(threading.Thread(target=_forward, args=way))
                    self._threads[-1].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_error: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for sock in (self._listener, *self._open):
            sock.close()
        self._stage.close()


def _forward(one: socket.socket, other: socket.socket, pieces: Iterable[bytes]) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            other.sendall(piece)
    for sock, how in ((other, socket.SHUT_WR), (one, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)


def _read(sock: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while piece := sock.recv(1 << 16):
            yield piece


def _damage(pieces: Iterator[bytes], fault: Fault, at: int) -> Iterator[bytes]:
    n_bytes = 0
    for piece in pieces:
        place = at - n_bytes
        n_bytes += len(piece)
        if 0 <= place < len(piece):
            rest = fault(piece[place:])
            yield piece[:place] + rest
            if not rest:
                return
        else:
            yield piece


# The damage to the bytes after one place. The connection closes where none are left.
FAULTS: dict[str, Fault] = {
    "flips a bit": lambda rest: bytes([rest[0] ^ 8]) + rest[1:],
    "loses bytes": lambda rest: rest[100:] or b"?",
    "repeats bytes": lambda rest: rest[:100] + rest,
    "injects bytes": lambda rest: bytes(64) + rest,
    "cuts": lambda _rest: b"",
}


def reduce_over_relay() -> tuple[int, Exception | None]:
    """Return the number of right calls and the error that ended them; a wrong sum raises."""
    pretend_hosts(1)
    os.environ["SHOAL_SOCKET_IFNAME"] = "lo"
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    with shoal.init(Detour(stage), rank, 2, timeout_s=20) as group:
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
        Relay(stage, FAULTS[what], at),
        start_ranks(reduce_over_relay, 2, env=stage.env) as ranks,
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
