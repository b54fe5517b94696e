"""The messages between the lowest worker of a job and a server, at the server's one port.

A connection opens with the handshake of every other connection of shoal, under a key derived from
the job's. Messages are sent by an `Endpoint`: sealed, in order, and bounded by their kind.

    Ask       request the state, for `shoal status`        -> Status
    Reserve   announce a job and its number of workers     -> Reserved
    Meet      serve this view, with this rank              -> Reserved
              (from the server, at any time)                  Leaving
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal.engine import Hello, Progress
from shoal.rendezvous.key import pair_key
from shoal.rendezvous.packing import MAX_FIELD_BYTES, Unpacker, number, text_field
from shoal.rendezvous.roster import MAX_ENTRY_BYTES

if TYPE_CHECKING:
    from shoal.engine import Peer

DEFAULT_PORT: Final = 7077
VERSION: Final = 5
MOST_RANKS: Final = 4096  # workers and servers of one view
MOST_STATUS_BYTES: Final = 60_000
MOST_ROSTER_BYTES: Final = 2 << 20  # of `MOST_RANKS`, 512 bytes each
_FIRST_KIND: Final = 16  # of the endpoint's messages
_TO_SERVER: Final = 2**32 - 3
"""The path in HELLO that means a server; a rank, a meeting and a store have other values."""


class Ask(NamedTuple):
    """Request the server's state, for `shoal status` and as a ping."""


class Status(NamedTuple):
    """The server's state, as JSON."""

    text: str


class Reserve(NamedTuple):
    """Ask the server to take a job of this name, with each worker on another host.

    Its version of shoal must equal the server's.
    """

    version: str
    job: str
    n_workers: int


class Reserved(NamedTuple):
    """The server's answer: it takes the job, or refuses it.

    Args:
        refused: the reason, a sentence for the job's log; empty: it takes the job.
        server: 16 random bytes of the server's process, which identify a restarted server.
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


class Leaving(NamedTuple):
    """The server is about to end, so the next view must not use it."""


Message = Ask | Status | Reserve | Reserved | Meet | Leaving
FROM_WORKERS: Final = (Ask, Reserve, Meet)
FROM_SERVERS: Final = (Status, Reserved, Leaving)


class _Field(NamedTuple):
    """Functions that write a field, and read and check it, and its maximum length in bytes."""

    write: Callable[[Any], bytes]
    read: Callable[[Unpacker], Any]
    most_bytes: int


def _number(n_bytes: int, low: int, high: int) -> _Field:
    return _Field(
        lambda value: number(value, n_bytes),
        lambda unpacker: unpacker.number(n_bytes, low, high),
        n_bytes,
    )


_LINE: Final = _Field(text_field, Unpacker.text, 1 + MAX_FIELD_BYTES)
_VIEW: Final = _number(8, 0, 2**63)
_IDENTITY: Final = _Field(bytes, lambda unpacker: unpacker.take(16), 16)
# The last field of a message has no length prefix.
_STATUS: Final = _Field(str.encode, lambda unpacker: unpacker.rest().decode(), MOST_STATUS_BYTES)
_ENTRY: Final = _Field(bytes, Unpacker.rest, MAX_ENTRY_BYTES)
_ROSTER: Final = _Field(bytes, Unpacker.rest, MOST_ROSTER_BYTES)

_FIELDS: Final[dict[type[Message], tuple[_Field, ...]]] = {
    Ask: (),
    Status: (_STATUS,),
    Reserve: (_LINE, _LINE, _number(2, 1, MOST_RANKS)),
    Reserved: (_LINE, _IDENTITY, _ENTRY),
    Meet: (
        *(_VIEW, _number(2, 1, MOST_RANKS - 1)),
        *(_number(2, 1, MOST_RANKS - 1), _number(2, 2, MOST_RANKS), _ROSTER),
    ),
    Leaving: (),
}
_KINDS: Final = {each: kind for kind, each in enumerate(_FIELDS, _FIRST_KIND)}
_TYPES: Final = {kind: each for each, kind in _KINDS.items()}


def expect(peer: Peer, types: tuple[type[Message], ...]) -> None:
    """Accept messages of these types; any other, or a longer one, ends the connection."""
    for each in types:
        peer.expect(_KINDS[each], sum(field.most_bytes for field in _FIELDS[each]))


def send(peer: Peer, message: Message) -> None:
    """Queue a message; the endpoint calls its owner's `lost` if the connection is lost."""
    peer.send(*encode(message))


def encode(message: Message) -> tuple[int, bytes]:
    """Return the kind and the body of a message."""
    fields = zip(_FIELDS[type(message)], message, strict=True)
    return _KINDS[type(message)], b"".join(field.write(value) for field, value in fields)


def decode(kind: int, body: bytes) -> Message:
    """Return the message with this kind and body; ValueError if they are malformed."""
    unpacker = Unpacker(body)
    if kind not in _TYPES:
        raise ValueError(f"unknown kind {kind} of message")
    each: Any = _TYPES[kind]
    message: Message = each(*[field.read(unpacker) for field in _FIELDS[each]])
    unpacker.end()
    if isinstance(message, Meet) and not message.n_workers <= message.rank < message.size:
        raise ValueError(f"rank {message.rank} of {message.size}, {message.n_workers} workers")
    return message


def why_not_reached(error: int, progress: Progress, was_connected: bool) -> str:
    """Return why a dial to a server failed, as a verb phrase."""
    if progress is Progress.KEY_DIFFERS:
        return (
            "does not have our job key: start it with --key-file and the file that SHOAL_KEY_FILE "
            "names"
        )
    if progress is not Progress.WAITING:
        return "speaks another protocol: install the same shoal on all machines"
    if was_connected:  # a server that speaks another protocol closes without an answer
        return "closes the connection: it is not a shoal server, or runs another version"
    return f"cannot be reached: {os.strerror(error)}"


def key_id(job_key: bytes) -> int:
    """Return a name by which the server finds this key, and that does not reveal the key."""
    digest = hashlib.blake2b(pair_key(job_key, 0, 0, 0, "server id"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hello_of(job_key: bytes) -> Hello:
    """Return the HELLO to a server from a holder of this key."""
    return Hello(epoch=key_id(job_key), rank=VERSION, to_rank=0, path=_TO_SERVER)


def is_for_server(hello: Hello) -> bool:
    """Return True if a caller expects a server, of this version."""
    return (hello.rank, hello.to_rank, hello.path) == (VERSION, 0, _TO_SERVER)


def server_key(job_key: bytes) -> bytes:
    """Return the key to prove in the handshake with a server."""
    return pair_key(job_key, 0, 0, 0, "server")
