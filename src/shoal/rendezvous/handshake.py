"""Both ends of the proof that opens every connection, without any I/O.

    client                                   server
    HELLO {epoch, rank, to_rank,
           path, nonce}                  ->
                                         <-  CHALLENGE {nonce}    or STALE, or silence
    PROOF {mac of "client"}              ->
                                         <-  WELCOME {mac of "server"}    or KEY_DIFFERS {digest}

Both macs cover HELLO and CHALLENGE, so a proof binds the epoch, the two ranks, the path and both
nonces, and cannot be replayed or reflected. KEY_DIFFERS ends a job, so it holds a digest of all
that the server saw: a client that sent or saw something else was not refused for its key, but for a
bit that flipped on the way, and may try again.

Every message has a fixed size: no length is ever read from the wire, and an end reads exactly
`wants` bytes, so what the peer sends after the handshake is never touched. Until it is proved
right, a peer gets at most 92 bytes read.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

MAGIC: Final = b"shoal/rv"
VERSION: Final = 4
N_NONCE_BYTES: Final = 16

_HELLO, _CHALLENGE, _PROOF, _WELCOME, _STALE, _KEY_DIFFERS = range(1, 7)
_PREFIX = struct.Struct("<8sHH")  # magic, version, kind
_HELLO_FORM = struct.Struct(f"<8sHHQIII{N_NONCE_BYTES}s")
_SHORT_FORM = struct.Struct(f"<8sHH{N_NONCE_BYTES}s")  # CHALLENGE, STALE
_LONG_FORM = struct.Struct("<8sHH32s")  # PROOF, WELCOME, KEY_DIFFERS


class Progress(enum.Enum):
    """How far one end has come; all but WAITING are final."""

    WAITING = "waiting"
    DONE = "done"
    STALE = "stale"  # the ends are not in the same epoch: read the records again
    KEY_DIFFERS = "key differs"  # the client could not prove the server's key
    REFUSED = "refused"  # not our protocol, or not who it should be: close without a word


class Hello(NamedTuple):
    """What a client says it is, before it has proved anything."""

    epoch: int
    rank: int
    to_rank: int
    path: int = 0


class _End:
    """Collects one fixed-size message at a time and hands it to the subclass."""

    def __init__(self, n_first_bytes: int) -> None:
        self.progress = Progress.WAITING
        self._n_message_bytes = n_first_bytes
        self._inbox = b""

    @property
    def wants(self) -> int:
        """How many bytes to read next, at most; 0 once `progress` is final."""
        if self.progress is not Progress.WAITING:
            return 0
        return self._n_message_bytes - len(self._inbox)

    def feed(self, data: bytes) -> bytes:
        """Take what was read and return what to send, often nothing. Bad bytes never raise."""
        if len(data) > self.wants:
            return self._end(Progress.REFUSED)
        self._inbox += data
        expected = MAGIC + struct.pack("<H", VERSION)
        if self._inbox[: len(expected)] != expected[: len(self._inbox)]:
            return self._end(Progress.REFUSED)
        if self.wants:
            return b""
        message, self._inbox = self._inbox, b""
        return self._take(_PREFIX.unpack_from(message)[2], message)

    def _take(self, kind: int, message: bytes) -> bytes:
        raise NotImplementedError

    def _end(self, progress: Progress, reply: bytes = b"") -> bytes:
        self.progress = progress
        return reply


class ClientHandshake(_End):
    """The end that connects. Send `hello` first, then whatever `feed` returns."""

    def __init__(self, hello: Hello, key: bytes, nonce: bytes | None = None) -> None:
        super().__init__(_SHORT_FORM.size)
        fresh = os.urandom(N_NONCE_BYTES) if nonce is None else nonce
        self.hello = _HELLO_FORM.pack(
            MAGIC, VERSION, _HELLO, hello.epoch, hello.rank, hello.to_rank, hello.path, fresh
        )
        self._key = key
        self._said = b""
        self._proof = b""

    def _take(self, kind: int, message: bytes) -> bytes:
        if not self._said:
            if kind == _STALE:
                return self._end(Progress.STALE)
            if kind != _CHALLENGE:
                return self._end(Progress.REFUSED)
            self._said = self.hello + message
            self._n_message_bytes = _LONG_FORM.size
            self._proof = _mac(self._key, b"client", self._said)
            return _LONG_FORM.pack(MAGIC, VERSION, _PROOF, self._proof)
        mac = _LONG_FORM.unpack(message)[3]
        if kind == _KEY_DIFFERS and mac == _digest(self._said, self._proof):
            return self._end(Progress.KEY_DIFFERS)
        right = hmac.compare_digest(mac, _mac(self._key, b"server", self._said))
        return self._end(Progress.DONE if kind == _WELCOME and right else Progress.REFUSED)


class ServerHandshake(_End):
    """The end that was connected to. Says nothing to whoever does not speak the protocol.

    Args:
        admit: judges a well-formed HELLO: returns the key to prove, or why not (STALE, which is
            told to the client, or REFUSED, which is not).
    """

    def __init__(
        self, admit: Callable[[Hello], bytes | Progress], nonce: bytes | None = None
    ) -> None:
        super().__init__(_HELLO_FORM.size)
        self.hello: Hello | None = None  # set once admitted; believe it only when DONE
        self._admit = admit
        self._nonce = os.urandom(N_NONCE_BYTES) if nonce is None else nonce
        self._key = b""
        self._said = b""

    def _take(self, kind: int, message: bytes) -> bytes:
        if self.hello is None:
            return self._take_hello(kind, message)
        mac = _LONG_FORM.unpack(message)[3]
        if kind != _PROOF:
            return self._end(Progress.REFUSED)
        if not hmac.compare_digest(mac, _mac(self._key, b"client", self._said)):
            refusal = _LONG_FORM.pack(MAGIC, VERSION, _KEY_DIFFERS, _digest(self._said, mac))
            return self._end(Progress.KEY_DIFFERS, refusal)
        welcome = _LONG_FORM.pack(MAGIC, VERSION, _WELCOME, _mac(self._key, b"server", self._said))
        return self._end(Progress.DONE, welcome)

    def _take_hello(self, kind: int, message: bytes) -> bytes:
        if kind != _HELLO:
            return self._end(Progress.REFUSED)
        _, _, _, epoch, rank, to_rank, path, _ = _HELLO_FORM.unpack(message)
        hello = Hello(epoch, rank, to_rank, path)
        verdict = self._admit(hello)
        if verdict is Progress.STALE:
            stale = _SHORT_FORM.pack(MAGIC, VERSION, _STALE, bytes(N_NONCE_BYTES))
            return self._end(Progress.STALE, stale)
        if isinstance(verdict, Progress):
            return self._end(Progress.REFUSED)
        self.hello, self._key = hello, verdict
        challenge = _SHORT_FORM.pack(MAGIC, VERSION, _CHALLENGE, self._nonce)
        self._said = message + challenge
        self._n_message_bytes = _LONG_FORM.size
        return challenge


def _digest(said: bytes, proof: bytes) -> bytes:
    return hashlib.sha256(b"differs" + said + proof).digest()


def _mac(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, who + said, "sha256")
