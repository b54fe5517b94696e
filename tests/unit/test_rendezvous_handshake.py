"""The handshake from Python: the bytes on the wire, errors, and what becomes of its objects.

native/test/test_handshake.cc tests who gets in, strangers and damage.
"""

import gc
import hashlib
import hmac
import weakref

import pytest

from shoal.engine import (
    HANDSHAKE_MAGIC,
    HANDSHAKE_VERSION,
    ClientHandshake,
    Hello,
    Progress,
    ServerHandshake,
)

HELLO = Hello(epoch=0x1122334455667788, rank=3, to_rank=1, path=5)
KEY, OTHER_KEY = b"k" * 32, b"x" * 32
HEAD = b"shoal/rv\x0a\x00"  # how every message begins
CLIENT_NONCE, SERVER_NONCE = bytes(range(16)), bytes(range(16, 32))


def client(key: bytes = KEY) -> ClientHandshake:
    return ClientHandshake(HELLO, key, CLIENT_NONCE)


def server(verdict: bytes | Progress = KEY) -> ServerHandshake:
    return ServerHandshake(lambda _: verdict, SERVER_NONCE)


def talk(one: ClientHandshake, other: ServerHandshake) -> None:
    """Let them talk until neither has anything to say."""
    message = one.hello
    while message:
        reply = other.feed(message)
        message = one.feed(reply) if reply else b""


def test_the_bytes_on_the_wire_are_these() -> None:
    one, other = client(), server()
    body = bytes.fromhex("8877665544332211 03000000 01000000 05000000")
    hello = HEAD + b"\x01\x00" + body + CLIENT_NONCE
    assert one.hello == hello + hmac.new(KEY, b"hello" + hello, hashlib.sha256).digest()[:16]
    digest = hashlib.sha256(b"differs" + one.hello).digest()[:16]
    assert server(OTHER_KEY).feed(one.hello) == HEAD + b"\x06\x00" + digest
    challenge = other.feed(one.hello)
    assert challenge == HEAD + b"\x02\x00" + SERVER_NONCE
    said = one.hello + challenge
    proof = one.feed(challenge)
    assert proof == HEAD + b"\x03\x00" + hmac.new(KEY, b"client" + said, hashlib.sha256).digest()
    welcome = other.feed(proof)
    assert welcome == HEAD + b"\x04\x00" + hmac.new(KEY, b"server" + said, hashlib.sha256).digest()


def test_it_works_byte_by_byte_and_never_wants_more_than_its_message() -> None:
    one, other = client(), server()
    outbox, inbox = one.hello, b""
    while Progress.WAITING in (one.progress, other.progress):
        for byte in outbox:
            assert other.wants
            inbox += other.feed(bytes([byte]))
        outbox = b""
        for byte in inbox:
            assert one.wants
            outbox += one.feed(bytes([byte]))
        inbox = b""
    assert (one.progress, other.progress) == (Progress.DONE, Progress.DONE)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x00",
        HANDSHAKE_MAGIC + (HANDSHAKE_VERSION + 1).to_bytes(2, "little"),  # a later version
        HEAD + b"\x03\x00" + bytes(52),  # a proof before any hello
        HEAD + b"\x01\x00" + bytes(53),  # more than a hello
    ],
)
def test_garbage_is_refused_at_its_first_wrong_byte_without_a_reply(garbage: bytes) -> None:
    other = server()
    assert other.feed(garbage) == b""
    assert other.progress is Progress.REFUSED


def test_what_the_doorkeeper_raises_comes_out_of_feed() -> None:
    def admit(_: Hello) -> bytes:
        raise LookupError("no such rank")

    with pytest.raises(LookupError, match="no such rank"):
        ServerHandshake(admit).feed(client().hello)


def test_a_server_that_leads_back_to_itself_is_collected() -> None:
    class Keeper:
        def admit(self, _: Hello) -> bytes:
            return KEY

    owner = Keeper()
    owner.end = ServerHandshake(owner.admit)  # type: ignore[attr-defined]
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None


def test_neither_end_shows_its_key() -> None:
    one, other = client(), server()
    talk(one, other)
    assert KEY.decode() not in repr(one) + repr(other) + repr(vars(type(one)))
