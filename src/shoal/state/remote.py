"""`shoal top` across hosts: a process serves its numbers to holders of the job key.

It listens on a TCP port besides its Unix socket, and serves a read-only store
(rendezvous/store/wire.py): the value of "n_parts" is the number of parts of a new document, and the
values of "0", "1" and so on are the parts. docs/top.md describes it.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import math
import resource
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal.engine import Endpoint, Progress
from shoal.errors import ShoalError
from shoal.rendezvous.interface import resolve
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import is_out_of_descriptors
from shoal.rendezvous.packing import number
from shoal.rendezvous.record import MAX_SIZE
from shoal.rendezvous.store import MAX_VALUE_BYTES
from shoal.rendezvous.store.server import Serving
from shoal.rendezvous.store.wire import GET, N_WAIT, STORE_HELLO, VALUE, store_key

if TYPE_CHECKING:
    from shoal.engine import Hello, Peer

VERSION: Final = 1
"""The document's version; raised when readers of the previous one would misread the new one."""

PATIENCE_S: Final = 2.0  # for the other end, on both ends
_ANSWER_S: Final = 5.0  # for all parts of a document together
MOST_BYTES: Final = 4 << 20  # of a document: the links of ten thousand ranks
_MOST_READERS: Final = 64  # of a rank at a time
_N_DIALS: Final = 64  # at a time: an endpoint has no more
_MOST_ENDPOINTS: Final = 64  # each takes two descriptors, and one for each rank that it asks
_OTHER_FILES: Final = 64  # descriptors of the reader besides
_N_AT_ONCE: Final = 16  # requests in flight: their replies, 64 KiB at most, fit into a socket
_READER_S: Final = 10.0  # until a rank drops a reader, which asks for one document
_N_PARTS: Final = "n_parts"

# Levels of a document. Its fields have four; printing JSON fails at about a thousand.
_MOST_DEPTH: Final = 16
_MOST_NUMBER: Final = 2.0**64  # Prometheus refuses a page with a number beyond a double's range

DAMAGED: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions from showing a document with missing fields or fields of wrong types."""


_ENDED: Final = "it has ended, or its connection broke"
_CANNOT_BE_READ: Final = "its numbers cannot be read"


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
    Asks as many places at a time as this process may open files, and 4096 at most. Each such batch
    takes two seconds if a place in it does not answer, and five if one answers slowly.
    """
    waiting, documents = collections.deque(places), list[dict[str, Any]]()
    n_free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    n_endpoints = min(-(-len(waiting) // _N_DIALS), n_free // (_N_DIALS + 2), _MOST_ENDPOINTS)
    with contextlib.ExitStack() as opened:
        askings, ready = [], select.poll()
        for _ in range(max(1, n_endpoints)):
            asking = _Asking(job_key, waiting, documents)
            opened.callback(asking.endpoint.close)
            ready.register(asking.endpoint, select.POLLIN)
            askings.append(asking)
        while (until := min([asking.ask_more() for asking in askings])) < math.inf:
            ready.poll(1000 * max(0.0, until - time.monotonic()))
            for asking in askings:
                asking.step()
    return sorted(documents, key=lambda one: one["rank"])


class _Question:
    """A place that is being asked; `error` describes it if it has not answered at `until`."""

    def __init__(self, place: Place, now: float) -> None:
        self.place = place
        self.error = "it does not answer"
        self.dials: set[int] = set()  # one for each address of its name
        self.peer: Peer | None = None
        self.n_parts = -1  # of the answer; not known yet
        self.parts: list[bytes] = []
        self._last = now + _ANSWER_S
        self.wait(now)

    def wait(self, now: float) -> None:
        """Wait for the next reply from now on."""
        self.until = min(now + PATIENCE_S, self._last)


class _Asking:
    """Asks places over its endpoint, one part of them if several share both lists.

    Args:
        waiting: the places that nobody has asked yet.
        documents: gets one for each place.
    """

    def __init__(
        self,
        job_key: bytes,
        waiting: collections.deque[Place],
        documents: list[dict[str, Any]],
    ) -> None:
        self._key = store_key(job_key)
        self._waiting, self._documents = waiting, documents
        self._open: set[_Question] = set()
        self._by_dial: dict[int, _Question] = {}
        self._by_peer: dict[Peer, _Question] = {}
        self._expire_at = math.inf
        try:
            self.endpoint = Endpoint(self, dial_s=PATIENCE_S)
        except OSError as error:
            raise ShoalError(f"cannot ask any rank: {error.strerror}") from error

    def ask_more(self) -> float:
        """Ask as many places as it can; return when `step` is due, or infinity at the end."""
        while self._waiting and len(self._open) < _N_DIALS:
            self._begin(self._waiting.popleft(), time.monotonic())
        return min(self._expire_at, self.endpoint.deadline) if self._open else math.inf

    def step(self) -> None:
        """Do what is due, and give up the places that have not answered in time."""
        self.endpoint.step(time.monotonic())
        now = time.monotonic()
        if now >= self._expire_at:
            for question in [one for one in self._open if now >= one.until]:
                self._end(question, question.error)
            self._expire_at = min((one.until for one in self._open), default=math.inf)

    def _begin(self, place: Place, now: float) -> None:
        question = _Question(place, now)
        if not place.port:
            self._end(question, "it was started without SHOAL_MONITOR=1, or without a job key")
            return
        try:
            addresses = resolve(place.address)
        except (OSError, UnicodeError) as error:
            self._end(question, str(error))
            return
        self._open.add(question)
        self._expire_at = min(self._expire_at, question.until)
        for address in addresses:
            dial = self.endpoint.connect(address, place.port, STORE_HELLO, self._key)
            question.dials.add(dial)
            self._by_dial[dial] = question

    def _end(self, question: _Question, error: str) -> None:
        place = question.place
        document = {"world": place.world, "rank": place.rank, "host": place.host, "error": error}
        self._end_with(question, document)

    def _end_with(self, question: _Question, document: dict[str, Any]) -> None:
        self._documents.append(document)
        self._open.discard(question)
        self._hang_up(question, *question.dials)
        if question.peer is not None:
            self._by_peer.pop(question.peer, None)
            question.peer.close()

    def _hang_up(self, question: _Question, *dials: int) -> None:
        for dial in dials:
            self.endpoint.hang_up(dial)
            self._by_dial.pop(dial)
            question.dials.discard(dial)

    # The endpoint's callbacks.

    def reached(self, peer: Peer, dial: int) -> None:
        """Ask the place, and end its other dials."""
        question = self._by_dial[dial]
        self._hang_up(question, *question.dials)
        question.peer, self._by_peer[peer] = peer, question
        question.wait(time.monotonic())
        peer.expect(VALUE, MAX_VALUE_BYTES)
        _request(peer, _N_PARTS)

    def not_reached(self, dial: int, error: int, progress: Progress, _was_connected: bool) -> None:
        """End the question if no further attempt can succeed."""
        question = self._by_dial[dial]
        if progress is Progress.KEY_DIFFERS:
            at = f"{question.place.address} port {question.place.port}"
            self._end(question, f"the process at {at} holds another key. {HOW_TO_SET_KEY}")
        elif error == errno.ECONNREFUSED:
            self._hang_up(question, dial)
            if not question.dials:
                self._end(question, _ENDED)
        elif is_out_of_descriptors(OSError(error, "")):
            question.error = "this process has no file descriptor left for it: raise `ulimit -n`"

    def received(self, peer: Peer, _kind: int, body: bytes, _fd: int) -> None:
        """Keep a reply, and request the next parts of the document."""
        question = self._by_peer[peer]
        question.wait(time.monotonic())
        try:
            if question.n_parts < 0:
                question.n_parts = min(max(0, int(body)), MOST_BYTES // MAX_VALUE_BYTES)
            else:
                question.parts.append(body)
            n_parts = len(question.parts)
            if n_parts == question.n_parts:
                self._end_with(question, _document_in(b"".join(question.parts), question.place))
            elif n_parts % _N_AT_ONCE == 0:
                last = min(n_parts + _N_AT_ONCE, question.n_parts)
                _request(peer, *map(str, range(n_parts, last)))
        except ShoalError as error:
            self._end(question, str(error))
        except ValueError:
            self._end(question, _CANNOT_BE_READ)

    def lost(self, peer: Peer, _error: int, _why: str) -> None:
        """End the question of this peer."""
        self._end(self._by_peer[peer], _ENDED)


def _request(peer: Peer, *keys: str) -> None:
    for key in keys:
        peer.send(GET, number(0, N_WAIT) + key.encode())


def _document_in(text: bytes, place: Place) -> dict[str, Any]:
    """Return the document in an answer; ShoalError if it is not valid, or not of this place."""
    try:
        found = dict(json.loads(text))
        if found["shoal_monitor"] != VERSION:
            raise ShoalError("it runs another version of shoal")
        found.pop("error", None)  # only the reader sets it
        if type(found["world"]) is not str or type(found["rank"]) is not int:
            raise ValueError("the world or the rank has a wrong type")
        _check_bounds(found)
        places_of(found)
    except (LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ShoalError(_CANNOT_BE_READ) from error
    if found["world"] == place.world and found["rank"] != place.rank:
        raise ShoalError(f"rank {found['rank']} answers in its place")
    return found
