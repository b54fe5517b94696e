"""What the lowest worker of a job and a server say to each other at the server's one port.

A connection opens with the handshake of every other connection of shoal, under a key derived from
the job's, before which nothing is read but that. Then come frames: a length, and a message that is
sealed with its kind and a checksum (rendezvous/packing.py). Whatever does not fit is a ValueError.

    Ask       what is there, for `shoal status`            -> Status
    Reserve   may this job come, with so many workers      -> Reserved
    Meet      serve this view, with this rank              -> Reserved
    Note      what the planner says of a kind of call      -> Reserved
              (from the server, at any time)                  Leaving
"""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import Final, NamedTuple

from shoal.engine import Hello
from shoal.rendezvous.key import pair_key
from shoal.rendezvous.packing import Unpacker, field, number, seal, text_field, unseal

DEFAULT_PORT: Final = 7077
VERSION: Final = 2
MOST_RANKS: Final = 4096  # workers and servers of one view
MAX_MESSAGE_BYTES: Final = 2 << 20  # a roster of `MOST_RANKS`, 512 bytes each; the rest is short
_MOST_WORDS_BYTES: Final = 1000  # of a planner's reasons
_KIND: Final = b"shoal/sv"
_LENGTH: Final = struct.Struct("<I")
_TO_SERVER: Final = 2**32 - 3
"""What HELLO says in the place of a path: neither a rank, nor a meeting, nor a store."""


class Ask(NamedTuple):
    """What `shoal status` asks."""


class Status(NamedTuple):
    """The answer: JSON."""

    text: str


class Reserve(NamedTuple):
    """May this job come?

    Args:
        version: of shoal, which must be the server's.
        job: its name, for people.
        n_workers: all on hosts of their own.
    """

    version: str
    job: str
    n_workers: int


class Reserved(NamedTuple):
    """Yes, or why not.

    Args:
        refused: a sentence for the job's log; empty: yes.
        server: 16 random bytes of this server's process, so that two names of one are noticed.
        entry: after Reserve and Meet, the server's entry in the roster of the next view.
    """

    refused: str
    server: bytes
    entry: bytes = b""


class Meet(NamedTuple):
    """Serve a view of the job.

    Args:
        rank: the server's, above all workers'; `size` counts both.
        roster: the entries of all ranks (view_mesh.py).
    """

    view: int
    n_workers: int
    rank: int
    size: int
    roster: bytes


class Note(NamedTuple):
    """How a kind of call is made in a view, for `shoal status`: the workers plan, servers do not.

    Args:
        kind: "all_reduce of 25.0 MiB float32 sum".
        how: by which algorithm, and why.
    """

    view: int
    kind: str
    how: str


class Leaving(NamedTuple):
    """The server is about to end: the next view must do without it."""


Message = Ask | Status | Reserve | Reserved | Meet | Leaving | Note
_TYPES: Final = (Ask, Status, Reserve, Reserved, Meet, Leaving, Note)


def own_version() -> str:
    """Of the shoal that runs here."""
    return str(sys.modules["shoal"].__version__)


def key_id(job_key: bytes) -> int:
    """Names a key without telling anything of it: which of its keys a server has to ask for."""
    digest = hashlib.blake2b(pair_key(job_key, 0, 0, 0, "server id"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hello_of(job_key: bytes) -> Hello:
    """What whoever holds this key says first to a server."""
    return Hello(epoch=key_id(job_key), rank=VERSION, to_rank=0, path=_TO_SERVER)


def is_for_server(hello: Hello) -> bool:
    """Whether that is what it says, in this version."""
    return (hello.rank, hello.to_rank, hello.path) == (VERSION, 0, _TO_SERVER)


def server_key(job_key: bytes) -> bytes:
    """What is proved to a server."""
    return pair_key(job_key, 0, 0, 0, "server")


def encode(message: Message) -> bytes:
    """A frame that holds this message."""
    body = number(_TYPES.index(type(message)), 1)
    if isinstance(message, Status):
        body += message.text.encode()
    elif isinstance(message, Reserve):
        body += text_field(message.version) + text_field(message.job)
        body += number(message.n_workers, 2)
    elif isinstance(message, Reserved):
        body += text_field(message.refused) + field(message.server) + message.entry
    elif isinstance(message, Meet):
        body += number(message.view, 8) + number(message.n_workers, 2)
        body += number(message.rank, 2) + number(message.size, 2)
        body += message.roster
    elif isinstance(message, Note):
        body += number(message.view, 8) + text_field(message.kind)
        body += message.how.encode()[:_MOST_WORDS_BYTES].decode(errors="ignore").encode()
    sealed = seal(_KIND, VERSION, body)
    if len(sealed) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(sealed)} bytes")
    return _LENGTH.pack(len(sealed)) + sealed


def decode(sealed: bytes) -> Message:
    """The message of one frame, without its length.

    Raises:
        ValueError: it is none.
    """
    version, body = unseal(_KIND, sealed)
    if version != VERSION:
        raise ValueError(f"version {version}")
    unpacker = Unpacker(body)
    kind = _TYPES[unpacker.number(1, 0, len(_TYPES) - 1)]
    message = _message(kind, unpacker)
    unpacker.end()
    return message


def _message(kind: type[Message], unpacker: Unpacker) -> Message:
    if kind is Status:
        return Status(unpacker.rest().decode())
    if kind is Reserve:
        return Reserve(unpacker.text(), unpacker.text(), unpacker.number(2, 1, MOST_RANKS))
    if kind is Reserved:
        return Reserved(unpacker.text(), _server_of(unpacker.field()), unpacker.rest())
    if kind is Meet:
        view, n_workers = unpacker.number(8, 0, 2**63), unpacker.number(2, 1, MOST_RANKS - 1)
        rank = unpacker.number(2, n_workers, MOST_RANKS - 1)
        size = unpacker.number(2, rank + 1, MOST_RANKS)
        return Meet(view, n_workers, rank, size, unpacker.rest())
    if kind is Note:
        return Note(unpacker.number(8, 0, 2**63), unpacker.text(), _words_of(unpacker.rest()))
    return Ask() if kind is Ask else Leaving()


def _server_of(data: bytes) -> bytes:
    if len(data) != 16:
        raise ValueError(f"{len(data)} bytes name a server")
    return data


def _words_of(data: bytes) -> str:
    text = data.decode()
    if len(data) > _MOST_WORDS_BYTES or not text.isprintable():
        raise ValueError(f"{len(data)} bytes are no words")
    return text


class Frames:
    """Cuts what arrives into messages. A frame that is too long is refused at its first bytes."""

    def __init__(self) -> None:
        self._inbox = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no frame has begun to arrive."""
        return not self._inbox

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            ValueError: what has arrived is no frame; nothing after it can be read.
        """
        self._inbox += data
        messages: list[Message] = []
        while len(self._inbox) >= _LENGTH.size:
            (n_bytes,) = _LENGTH.unpack_from(self._inbox)
            if n_bytes > MAX_MESSAGE_BYTES:
                raise ValueError(f"a frame of {n_bytes} bytes")
            end = _LENGTH.size + n_bytes
            if len(self._inbox) < end:
                break
            messages.append(decode(bytes(self._inbox[_LENGTH.size : end])))
            del self._inbox[:end]
        return messages
