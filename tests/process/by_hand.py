"""The handshake as docs/wire.md describes it, for tests that then write raw bytes."""

import hmac
import struct
from collections.abc import Callable

from shoal.engine import Hello

HEAD = b"shoal/rv\x0a\x00"  # the prefix of every message
NONCE = bytes(range(16))


def first_message(hello: Hello, key: bytes, nonce: bytes = NONCE) -> bytes:
    """Return a HELLO."""
    what = struct.pack("<QIII", hello.epoch, hello.rank, hello.to_rank, hello.path)
    sent = HEAD + b"\x01\x00" + what + nonce
    return sent + hmac.digest(key, b"hello" + sent, "sha256")[:16]


def prove(hello: Hello, key: bytes, exchange: Callable[[bytes, int], bytes]) -> bytes:
    """Prove a key; return the key of the session.

    Args:
        exchange: sends these bytes, and returns the given number of reply bytes.
    """
    sent = first_message(hello, key)
    challenge = exchange(sent, 28)
    assert challenge[:12] == HEAD + b"\x02\x00"
    sent += challenge
    proof = HEAD + b"\x03\x00" + hmac.digest(key, b"client" + sent, "sha256")
    assert exchange(proof, 44) == HEAD + b"\x04\x00" + hmac.digest(key, b"server" + sent, "sha256")
    return hmac.digest(key, b"session" + sent, "sha256")
