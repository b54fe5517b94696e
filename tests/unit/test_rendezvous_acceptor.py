"""What strangers at the acceptor cost: real Unix sockets, a clock moved by hand, no waiting."""

import contextlib
import selectors
import socket
from collections.abc import Iterator

import pytest

from shoal.engine import ClientHandshake, Hello, Progress
from shoal.rendezvous.acceptor import Acceptor, Limits, run_ready
from shoal.rendezvous.listener import listen_unix, unix_address

KEY = b"k" * 32


class House:
    """An acceptor with one Unix listener, its owner, and a clock."""

    def __init__(self, n_pending: int) -> None:
        self.now = 0.0
        self.arrived: list[Hello] = []
        self.differing: list[Hello] = []
        self._selector = selectors.DefaultSelector()
        listener, self._name = listen_unix()
        limits = Limits(n_pending=n_pending, pending_s=2.0)
        self.acceptor = Acceptor(self._selector, self, limits, clock=lambda: self.now)
        self.acceptor.open(listener)
        self._callers: list[socket.socket] = []

    def admit(self, hello: Hello) -> bytes | Progress:
        return KEY if hello.to_rank == 0 else Progress.REFUSED

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        self.arrived.append(hello)
        self._callers.append(sock)

    def key_differs(self, hello: Hello) -> None:
        self.differing.append(hello)

    def call(self, message: bytes = b"") -> socket.socket:
        """Connect, say something, and let the acceptor take notice."""
        sock = socket.socket(socket.AF_UNIX)
        self._callers.append(sock)
        sock.connect(unix_address(self._name))
        if message:
            sock.sendall(message)
        self.turn()
        return sock

    def prove(self, rank: int, key: bytes = KEY) -> Progress:
        """Go through the client's whole handshake."""
        handshake = ClientHandshake(Hello(0, rank, 0), key)
        sock = self.call(handshake.hello)
        while handshake.wants and (data := heard(sock)):
            if reply := handshake.feed(data):
                sock.sendall(reply)
            self.turn()
        return handshake.progress

    def turn(self) -> None:
        run_ready(self._selector, 0)

    def close(self) -> None:
        self.acceptor.close()
        self._selector.close()
        for sock in self._callers:
            sock.close()


def heard(sock: socket.socket) -> bytes | None:
    """What has arrived: b"" if the acceptor closed the connection, None if nothing."""
    sock.setblocking(False)
    try:
        return sock.recv(100)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # closed with something of ours unread
        return b""
    finally:
        sock.setblocking(True)


@pytest.fixture
def house() -> Iterator[House]:
    with contextlib.closing(House(n_pending=4)) as made:
        yield made


def test_who_proves_the_key_is_welcomed(house: House) -> None:
    assert house.prove(rank=3) is Progress.DONE
    assert house.arrived == [Hello(0, 3, 0)]
    assert house.acceptor.n_pending == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"shoal/rv\x01\x00",
        bytes(5000),
        ClientHandshake(Hello(0, 1, 9), KEY).hello,
    ],
    ids=["a byte", "http", "an old version", "zeros", "to another rank"],  # NOT the bytes: a nonce
)
def test_garbage_is_closed_without_a_reply(house: House, garbage: bytes) -> None:
    caller = house.call(garbage)
    assert heard(caller) == b""
    assert house.acceptor.n_pending == 0


def test_silence_ends_after_two_seconds_and_not_before(house: House) -> None:
    first = house.call()
    house.now = 1.0
    second = house.call(b"shoal")  # some good bytes do not prolong it
    assert house.acceptor.next_deadline() == 2.0
    house.now = 1.99
    house.acceptor.expire(house.now)
    assert (heard(first), heard(second)) == (None, None)
    house.now = 2.0
    house.acceptor.expire(house.now)
    assert (heard(first), heard(second)) == (b"", None)
    assert house.acceptor.next_deadline() == 3.0
    house.acceptor.expire(3.0)
    assert heard(second) == b""
    assert house.acceptor.next_deadline() is None


def test_a_holder_of_the_key_gets_in_past_any_number_of_silent_callers(house: House) -> None:
    silent = [house.call() for _ in range(20)]
    assert house.acceptor.n_pending == 4
    assert house.prove(rank=1) is Progress.DONE
    assert [heard(caller) for caller in silent[:16]] == [b""] * 16


def test_callers_who_said_a_right_hello_are_pushed_out_last_and_the_oldest_first(
    house: House,
) -> None:
    greeters = [house.call(ClientHandshake(Hello(0, rank, 0), KEY).hello) for rank in range(1, 5)]
    assert all(heard(greeter) for greeter in greeters)
    silent = house.call()
    assert [heard(greeter) for greeter in greeters] == [b"", None, None, None]
    assert house.prove(rank=5) is Progress.DONE
    assert heard(silent) == b""


def test_a_hello_of_who_lacks_the_key_holds_no_place(house: House) -> None:
    forger = house.call(ClientHandshake(Hello(0, 1, 0), b"x" * 32).hello)
    assert heard(forger)  # that its key is another
    assert heard(forger) == b""
    assert house.acceptor.n_pending == 0


def test_another_key_is_told_to_both_sides(house: House) -> None:
    assert house.prove(rank=2, key=b"x" * 32) is Progress.KEY_DIFFERS
    assert house.differing == [Hello(0, 2, 0)]
    assert house.arrived == []


def test_a_caller_that_hangs_up_is_forgotten(house: House) -> None:
    house.call(b"shoal").close()
    house.turn()
    assert house.acceptor.n_pending == 0


def test_closing_closes_everyone_at_the_door_and_can_be_repeated(house: House) -> None:
    caller = house.call()
    house.acceptor.close()
    house.acceptor.close()
    assert heard(caller) == b""
    with pytest.raises(ConnectionRefusedError):
        house.call()
