"""`shoal top` across hosts: a process serves its numbers to holders of the job key.

It listens on a TCP port besides its Unix socket, and serves a read-only store
(rendezvous/store/wire.py): the value of "n_parts" is the number of parts of a new document, and the
values of "0", "1" and so on are the parts. docs/top.md describes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal.errors import PeerLost, ShoalError, TimedOut
from shoal.rendezvous.record import MAX_SIZE
from shoal.rendezvous.store import MAX_VALUE_BYTES
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import Serving
from shoal.rendezvous.store.wire import VALUE
from shoal.threads import Threads

if TYPE_CHECKING:
    from shoal.engine import Hello, Peer

VERSION: Final = 1
"""The document's version; raised when readers of the previous one would misread the new one."""

PATIENCE_S: Final = 2.0  # for the other end, on both ends
_ANSWER_S: Final = 5.0  # for all parts of a document together
MOST_BYTES: Final = 4 << 20  # of a document: the links of ten thousand ranks
_MOST_READERS: Final = 64  # of a rank at a time
MOST_ASKED: Final = 64  # ranks at a time: each takes a thread and five descriptors
_READER_S: Final = 10.0  # until a rank drops a reader, which asks for one document
_N_PARTS: Final = "n_parts"

# Levels of a document. Its fields have four; printing JSON fails at about a thousand.
_MOST_DEPTH: Final = 16
_MOST_NUMBER: Final = 2.0**64  # Prometheus refuses a page with a number beyond a double's range

DAMAGED: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions from showing a document with missing fields or fields of wrong types."""


class Place(NamedTuple):
    """A rank of a world, its host's name, and its address for readers; port 0: none."""

    world: str
    rank: int
    host: str
    address: str
    port: int


class Answering(Serving):
    """Serves documents; clients cannot write.

    Args:
        read: returns a document; called on the serving thread.
    """

    key_differs_text = "`shoal top` with another job key asked for numbers, and was refused"
    most_clients = _MOST_READERS

    def __init__(self, listener: socket.socket, job_key: bytes, read: Callable[[], bytes]) -> None:
        super().__init__([listener], job_key)
        self.read = read
        self._documents: dict[Peer, bytes] = {}
        self._until: dict[Peer, float] = {}  # when each reader is dropped

    def welcome(self, peer: Peer, hello: Hello) -> None:
        """Take requests from a reader for `_READER_S`, so that a stopped one is dropped."""
        super().welcome(peer, hello)
        if peer in self._clients:
            self._until[peer] = time.monotonic() + _READER_S

    def _expire(self, now: float) -> float:
        for peer in [peer for peer, until in self._until.items() if now >= until]:
            peer.close()
            self.lost(peer)
        return min(super()._expire(now), *self._until.values(), float("inf"))

    def _set(self, peer: Peer, key: str, value: bytes) -> None:
        raise ValueError("nothing can be written here")

    def _get(self, peer: Peer, key: str, wait_ms: int) -> None:
        if key == _N_PARTS:
            document = self._documents[peer] = self.read()
            self._reply(peer, VALUE, b"%d" % -(-len(document) // MAX_VALUE_BYTES))
        else:
            begin = int(key) * MAX_VALUE_BYTES
            part = self._documents.get(peer, b"")[begin : begin + MAX_VALUE_BYTES]
            self._reply(peer, VALUE, part)

    def lost(self, peer: Peer, error: int = 0, why: str = "") -> None:
        """Drop a client and its document."""
        super().lost(peer, error, why)
        self._documents.pop(peer, None)
        self._until.pop(peer, None)


def places_of(document: dict[str, Any]) -> list[Place]:
    """Return the places of the ranks of a document's world; ValueError or OSError for bad data."""
    places = [Place(document["world"], *place) for place in document["monitors"]]
    if len({place.rank for place in places}) != len(places) or len(places) > MAX_SIZE:
        raise ValueError("ranks repeat, or are too many")
    for place in places:
        # Numeric only: a name would be resolved, which can block for seconds.
        socket.inet_pton(socket.AF_INET6 if ":" in place.address else socket.AF_INET, place.address)
        kinds = type(place.rank), type(place.host), type(place.port)
        if kinds != (int, str, int) or not 0 <= place.port <= 65535:
            raise ValueError("a place has a field of a wrong type, or a port out of range")
    return places


def _check_bounds(document: dict[str, Any]) -> None:
    """Raise ValueError for a number out of range, or too deep nesting, anywhere in a document."""
    level: list[Any] = [document]
    for _ in range(_MOST_DEPTH):
        within = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for several in within for one in several if not isinstance(one, str)]
        if not all(abs(one) <= _MOST_NUMBER for one in level if isinstance(one, (int, float))):
            raise ValueError("a number is not finite, or larger than any counter")
        level = [one for one in level if isinstance(one, (dict, list))]
    if level:
        raise ValueError("values are nested too deeply")


def ask(places: Iterable[Place], job_key: bytes) -> list[dict[str, Any]]:
    """Return the document of each place; for a place that fails, a document with `error`.

    Numbers are finite. Fields besides `world`, `rank` and `monitors` may be missing or of any type.
    Takes two seconds for each 64 places that do not answer, and five for 64 that answer slowly.
    """
    documents: list[dict[str, Any]] = []
    threads = Threads("shoal top", MOST_ASKED)
    for place in places:
        threads.submit(functools.partial(_ask, place, job_key, documents))
    threads.finish()
    return sorted(documents, key=lambda one: one["rank"])


def _ask(place: Place, job_key: bytes, documents: list[dict[str, Any]]) -> None:
    why = "it was started without SHOAL_MONITOR=1, or without a job key"
    begun_s = time.monotonic()
    if place.port:
        try:
            documents.append(_document_at(place, job_key))
            return
        except TimedOut:
            why = "it does not answer"
        except PeerLost:
            is_slow = time.monotonic() - begun_s >= PATIENCE_S
            why = "it does not answer" if is_slow else "it has ended, or its connection broke"
        except (ShoalError, OSError, UnicodeError) as error:
            why = str(error)
    documents.append({"world": place.world, "rank": place.rank, "host": place.host, "error": why})


def _document_at(place: Place, job_key: bytes) -> dict[str, Any]:
    client = TcpStoreClient(
        place.address,
        place.port,
        timeout_s=PATIENCE_S,
        total_s=_ANSWER_S,
        key=job_key,
        is_served=True,
    )
    with contextlib.closing(client):
        try:
            n_parts = min(int(client.try_get(_N_PARTS) or 0), MOST_BYTES // MAX_VALUE_BYTES)
            parts = client.try_get_all([str(part) for part in range(n_parts)])
            found = dict(json.loads(b"".join(parts or ())))
            if found["shoal_monitor"] != VERSION:
                raise ShoalError("it runs another version of shoal")
            found.pop("error", None)  # only the reader sets it
            if type(found["world"]) is not str or type(found["rank"]) is not int:
                raise ValueError("the world or the rank has a wrong type")
            _check_bounds(found)
            places_of(found)
        except (LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            raise ShoalError("its numbers cannot be read") from error
    if found["world"] == place.world and found["rank"] != place.rank:
        raise ShoalError(f"rank {found['rank']} answers in its place")
    return found
