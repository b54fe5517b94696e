"""The native endpoint from Python: its wire format, its callbacks, and object lifetimes."""

import contextlib
import functools
import gc
import hashlib
import hmac
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
from process.by_hand import HEAD, first_message, prove
from process.serving import Talker

from shoal.engine import HANDSHAKE_VERSION, Endpoint, Hello, Peer, Progress

KEY = b"k" * 32
HELLO = Hello(7, 3, 0, 5)
WORD = 300


class Owner(Talker):
    """Keeps the endpoint's reports, in order."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.verdict: bytes | Progress | Exception = KEY
        self.seen: list[tuple[object, ...]] = []
        self.raises: Exception | None = None

    def admit(self, hello: Hello) -> bytes | Progress:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict if hello == HELLO else Progress.REFUSED

    def welcome(self, peer: Peer, hello: Hello) -> None:
        peer.expect(WORD, 100)
        self.peers.append(peer)
        self.seen.append(("welcome", hello.rank))

    def reached(self, peer: Peer, dial: int) -> None:
        self.peers.append(peer)
        self.seen.append(("reached", dial))

    def key_differs(self, hello: Hello) -> None:
        self.seen.append(("key differs", hello.rank))

    def received(self, peer: Peer, kind: int, body: bytes, fd: int) -> None:
        if self.raises is not None:
            raised, self.raises = self.raises, None
            raise raised
        self.seen.append(("received", self.peers.index(peer), kind, body, fd))

    def lost(self, peer: Peer, error: int, why: str) -> None:
        self.seen.append(("lost", self.peers.index(peer), error, why))


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner() as made:
        yield made


def exchange(owner: Owner, sock: socket.socket, message: bytes, n_bytes: int) -> bytes:
    """Send bytes to the endpoint, and return a reply of the given length."""
    received = b""

    def is_complete() -> bool:
        nonlocal received
        with contextlib.suppress(BlockingIOError):
            received += sock.recv(n_bytes - len(received), socket.MSG_DONTWAIT)
        return len(received) == n_bytes

    sock.sendall(message)
    owner.run_until(is_complete)
    return received


@contextlib.contextmanager
def called_by_hand(owner: Owner) -> Iterator[tuple[socket.socket, bytes]]:
    """Return a socket that has proved the key to the endpoint, and the session of both."""
    with socket.create_connection(("127.0.0.1", owner.listen())) as sock:
        session = prove(HELLO, KEY, functools.partial(exchange, owner, sock))
        owner.run_until(lambda: owner.peers)
        yield sock, session


def test_a_calling_endpoint_makes_the_documented_handshake(owner: Owner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner.endpoint.connect(*listener.getsockname(), HELLO, KEY)
        owner.endpoint.step(time.monotonic())
        sock, _ = listener.accept()
    with sock:
        sent = exchange(owner, sock, b"", 64)
        assert sent == first_message(HELLO, KEY, sent[32:48])
        challenge = HEAD + b"\x02\x00" + bytes(range(16, 32))
        proof = exchange(owner, sock, challenge, 44)
        sent += challenge
        assert proof == HEAD + b"\x03\x00" + hmac.digest(KEY, b"client" + sent, "sha256")
        sock.sendall(HEAD + b"\x04\x00" + hmac.digest(KEY, b"server" + sent, "sha256"))
        owner.run_until(lambda: owner.peers)


def test_a_caller_without_the_key_is_answered_with_a_digest_of_its_hello(owner: Owner) -> None:
    owner.verdict = bytes(32)
    with socket.create_connection(("127.0.0.1", owner.listen())) as sock:
        sent = first_message(HELLO, KEY)
        digest = hashlib.sha256(b"differs" + sent).digest()[:16]
        assert exchange(owner, sock, sent, 28) == HEAD + b"\x06\x00" + digest
    assert owner.seen == [("key differs", 3)]


def frame(session: bytes, use: bytes, number: int, kind: int, body: bytes) -> bytes:
    """Return a frame as docs/wire.md describes it."""
    key = hmac.digest(session, use, "sha256")
    head = struct.pack("<8sHHI", b"shoal/rv", HANDSHAKE_VERSION, kind, len(body))
    sealed = struct.pack("<Q", number) + head + body
    return head + body + hmac.new(key, sealed, hashlib.sha256).digest()


def test_frames_on_the_wire_are_as_documented(owner: Owner) -> None:
    with called_by_hand(owner) as (sock, session):
        sock.sendall(frame(session, b"frames of the caller", 0, WORD, b"one"))
        sock.sendall(frame(session, b"frames of the caller", 1, WORD, b""))
        owner.run_until(lambda: len(owner.seen) == 3)
        received = [("received", 0, WORD, body, -1) for body in (b"one", b"")]
        assert owner.seen == [("welcome", 3), *received]
        (peer,) = owner.peers
        assert peer.send(WORD, b"a reply")
        assert peer.send(WORD + 1)
        expected = frame(session, b"frames of the called", 0, WORD, b"a reply")
        expected += frame(session, b"frames of the called", 1, WORD + 1, b"")
        assert sock.recv(len(expected), socket.MSG_WAITALL) == expected


def test_an_error_of_admit_is_raised_by_step_and_the_caller_is_refused(owner: Owner) -> None:
    owner.verdict = LookupError("no such rank")
    with socket.create_connection(("127.0.0.1", owner.listen())) as sock:
        sock.sendall(first_message(HELLO, KEY))
        with pytest.raises(LookupError, match="no such rank"):
            owner.run_until(lambda: False)
        assert sock.recv(1) == b""
    assert owner.endpoint.n_pending == 0


def test_an_error_of_a_callback_is_raised_by_step_and_the_rest_goes_on(owner: Owner) -> None:
    with called_by_hand(owner) as (sock, session):
        owner.raises = LookupError("of a callback")
        for number in range(2):
            sock.sendall(frame(session, b"frames of the caller", number, WORD, b"x"))
        with pytest.raises(LookupError, match="of a callback"):
            owner.run_until(lambda: False)
        owner.run_until(lambda: len(owner.seen) == 2)
        assert owner.seen[1] == ("received", 0, WORD, b"x", -1)


def test_a_waiting_daemon_thread_does_not_abort_an_exiting_process() -> None:
    script = """
import threading, time
from shoal.engine import Endpoint
from shoal.rendezvous.listener import wait_for

endpoint, is_waiting = Endpoint(object()), threading.Event()

def wait():
    while True:
        is_waiting.set()
        wait_for(endpoint, time.monotonic() + 0.01)

class Last:  # gives a finalizing interpreter's other threads their turn
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

last = Last()
for _ in range(8):
    threading.Thread(target=wait, daemon=True).start()
is_waiting.wait()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_owner_of_an_endpoint_is_collected_and_at_once_after_a_close() -> None:
    forgotten, closed = Owner(), Owner()
    seen = weakref.ref(forgotten), weakref.ref(closed)
    closed.endpoint.close()
    gc.disable()
    try:
        del closed
        assert seen[1]() is None
    finally:
        gc.enable()
    del forgotten
    gc.collect()
    assert seen[0]() is None


def test_an_endpoint_without_a_called_constructor_is_collected() -> None:
    cycle: list[object] = [Endpoint.__new__(Endpoint)]
    cycle.append(cycle)
    del cycle
    assert gc.collect() > 0
