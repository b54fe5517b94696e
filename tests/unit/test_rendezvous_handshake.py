"""Both ends of the handshake, fed by hand: who gets in, who does not, and the bytes on the wire."""

import gc
import hashlib
import hmac
import random
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


def test_two_holders_of_the_key_both_finish() -> None:
    one, other = client(), server()
    talk(one, other)
    assert (one.progress, other.progress) == (Progress.DONE, Progress.DONE)
    assert other.hello == HELLO
    assert (one.wants, other.wants) == (0, 0)


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


def test_different_keys_are_noticed_by_both() -> None:
    one, other = client(OTHER_KEY), server()
    talk(one, other)
    assert (one.progress, other.progress) == (Progress.KEY_DIFFERS, Progress.KEY_DIFFERS)


@pytest.mark.parametrize("is_same_key", [True, False])
def test_no_flipped_bit_is_taken_for_another_key(is_same_key: bool) -> None:
    def run(flip: int | None) -> tuple[Progress, int]:
        one, other = client(), server(KEY if is_same_key else OTHER_KEY)
        n_bits, message, ends = 0, one.hello, (other, one)
        while message:
            if flip is not None and n_bits <= flip < n_bits + 8 * len(message):
                damaged = bytearray(message)
                damaged[(flip - n_bits) // 8] ^= 1 << (flip - n_bits) % 8
                message = bytes(damaged)
            n_bits += 8 * len(message)
            message, ends = ends[0].feed(message), ends[::-1]
        return one.progress, n_bits

    progress, n_bits = run(None)
    assert progress is (Progress.DONE if is_same_key else Progress.KEY_DIFFERS)
    for flip in range(n_bits):
        assert run(flip)[0] is not Progress.KEY_DIFFERS, flip


def test_another_epoch_is_told_to_the_client() -> None:
    one, other = client(), server(Progress.STALE)
    talk(one, other)
    assert (one.progress, other.progress) == (Progress.STALE, Progress.STALE)
    assert other.hello is None


def test_a_hello_for_somebody_else_gets_no_reply() -> None:
    other = server(Progress.REFUSED)
    assert other.feed(client().hello) == b""
    assert other.progress is Progress.REFUSED


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


def test_a_server_without_the_key_does_not_convince_the_client() -> None:
    one, other = client(), server()
    one.feed(other.feed(one.hello))
    said = one.hello + HEAD + b"\x02\x00" + SERVER_NONCE
    forged = hmac.new(OTHER_KEY, b"server" + said, hashlib.sha256).digest()
    assert one.wants == 44
    one.feed(HEAD + b"\x04\x00" + forged)
    assert one.progress is Progress.REFUSED


def test_a_clients_own_proof_sent_back_is_no_welcome() -> None:
    one, other = client(), server()
    proof = one.feed(other.feed(one.hello))
    one.feed(proof[:10] + b"\x04\x00" + proof[12:])
    assert one.progress is Progress.REFUSED


def test_a_recorded_proof_is_worthless_against_a_fresh_nonce() -> None:
    one, other = client(), server()
    proof = one.feed(other.feed(one.hello))
    later = ServerHandshake(lambda _: KEY)
    later.feed(one.hello)
    assert later.feed(proof) == b""
    assert later.progress is Progress.REFUSED


def test_no_bytes_at_all_make_either_end_raise_or_finish() -> None:
    chance = random.Random(1)
    hello = client().hello
    for _ in range(2000):
        one, other = client(), server()
        noise = bytearray(hello + chance.randbytes(60))
        noise[chance.randrange(len(noise))] ^= 1 << chance.randrange(8)
        for end in (one, other):
            while end.wants:
                n_bytes = chance.randrange(1, end.wants + 1)
                end.feed(bytes(noise[:n_bytes]))
                noise = noise[n_bytes:] or bytearray(chance.randbytes(60))
            assert end.progress is not Progress.DONE


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
