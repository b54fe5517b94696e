"""The parent process: accepts connections, answers, and starts a child for each view of a job.

It holds no tensors and no job's memory, waits in one selector, and ends only by a signal: no
message of a peer and no fault of a child ends it.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.engine import Endpoint, Hello, Peer, Progress
from shoal.group.pool.addresses import Address
from shoal.group.pool.protocol import (
    MOST_STATUS_BYTES,
    Ask,
    Leaving,
    Meet,
    Reserve,
    Reserved,
    Status,
    decode,
    is_for_server,
)
from shoal.group.pool.view_mesh import MEETING_S
from shoal.plan.text import counted
from shoal.rendezvous.announcing import own_version
from shoal.rendezvous.key import random_key
from shoal.rendezvous.listener import note_turned_away, run_ready
from shoal.server.child import start
from shoal.server.http import BEGINNINGS, HttpCaller
from shoal.server.job import Job, Pace
from shoal.server.views import Views

if TYPE_CHECKING:
    from shoal.server.options import JobKey

_LOG: Final = logging.getLogger("shoal")

_MOST_CONNECTIONS: Final = 1024
_MOST_HTTP: Final = 32
_DRAIN_S: Final = 10.0  # after SIGTERM, until calls in flight are cut off
# The longest wait of a view for its process; its workers give the view up soon after.
_MOST_WAIT_S: Final = MEETING_S / 2
_UNRESERVED: Final = "nothing was reserved"
_PAUSE_S: Final = 0.05  # after a turn that failed: it may fail again at once
# Of one job or rail: the view that serves, the next one, and two that their workers have left.
_MOST_VIEWS: Final = 4
# Each rail of a job with several workers on a host has its own views, and so has each group of the
# job's workers. The server takes only as many as have room for a view and the next one: otherwise
# each new view would end a serving one, which its workers would ask for again.
_MOST_VIEWS_OF_KEY: Final = 4 * 64
_MOST_OF_KEY: Final = _MOST_VIEWS_OF_KEY // 2
# A message that stops half way for this long ends its connection. This many bytes of answers wait
# for a job that does not read: several answers, so that a stopped worker can catch up.
_PATIENCE_S: Final = 2.0
_MOST_QUEUED_BYTES: Final = 4 * MOST_STATUS_BYTES


def as_text(state: dict[str, Any]) -> str:
    """Return JSON that fits an answer; leaves out the last views if it is too long."""
    fitting: dict[str, Any] = {**state, "views": []}
    room = MOST_STATUS_BYTES - len(json.dumps(fitting))
    for view in state["views"]:
        room -= len(json.dumps(view)) + 2  # ", "
        if room < 0:
            break
        fitting["views"].append(view)
    return json.dumps(fitting)


class Server:
    """Serves jobs until a signal ends it.

    Args:
        listeners: owned from here on.
        keys: their holders may use the server.
        most_jobs: the most jobs served at a time.
        memory_bytes: of one view: half of it for staging, half of that for windows.
        http: True to serve /healthz, /readyz and /metrics.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        keys: Sequence[JobKey],
        *,
        most_jobs: int = 16,
        memory_bytes: int = 1 << 30,
        http: bool = True,
    ) -> None:
        self._most_jobs, self._memory_bytes = most_jobs, memory_bytes
        self._keys = {key.number: key for key in keys}
        self._paces = {number: Pace() for number in self._keys}
        self._identity = os.urandom(16)
        self._selector = selectors.DefaultSelector()
        self._views = Views(self._selector)
        self._jobs: dict[Peer, Job] = {}
        # Views that wait for a process, with their deadlines, in order of arrival.
        self._waiting: dict[Job, tuple[Meet, float]] = {}
        self._http: list[HttpCaller] = []
        self._drains_until: float | None = None
        self._ends = False
        self._handlers: dict[type, Callable[[Job, Any], None]] = {
            Ask: self._on_ask,
            Reserve: self._on_reserve,
            Meet: self._on_meet,
        }
        self._endpoint = Endpoint(
            self,
            most_queued=_MOST_QUEUED_BYTES,
            patience_s=_PATIENCE_S,
            beginnings=BEGINNINGS if http else (),
        )
        self._selector.register(self._endpoint, selectors.EVENT_READ, lambda: None)
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        for listener in listeners:
            self._endpoint.listen(listener.detach())

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, and then until no view is left or `_DRAIN_S` have passed.

        A second signal ends the server at once. Call this on the main thread.
        """
        noted, woken = socket.socketpair()
        noted.setblocking(False)
        woken.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._on_signal(woken))
        previous = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        signal.set_wakeup_fd(noted.fileno())
        where = ", ".join(str(Address(*address)) for address in self.addresses)
        # NOT before: a reader of this line may end the server by a signal.
        _LOG.info("serving %s at %s", counted(len(self._keys), "key"), where)
        try:
            while not self._ends:
                self._try_turn()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._close()
            noted.close()
            woken.close()

    def drain(self) -> None:
        """Take no more jobs, notify the connected ones, and end once no view is left."""
        if self._drains_until is not None:
            self._ends = True
            return
        self._drains_until = time.monotonic() + _DRAIN_S
        n = self._views.n
        _LOG.info("draining: %s %s served", counted(n, "view"), "is" if n == 1 else "are")
        for job in self._jobs.values():
            job.send(Leaving())

    # The endpoint's owner.

    def admit(self, hello: Hello) -> bytes | Progress:
        """Return the key that a caller names; a random key instead of an unknown one."""
        if not is_for_server(hello):
            return Progress.REFUSED
        key = self._keys.get(hello.epoch)
        return random_key() if key is None else key.proof

    def welcome(self, peer: Peer, hello: Hello) -> None:
        """Take requests from a job."""
        if len(self._jobs) >= _MOST_CONNECTIONS:
            peer.close()
            return
        key = self._keys[hello.epoch]
        self._jobs[peer] = Job(peer, key, self._paces[key.number])

    def received(self, peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        """Handle a request."""
        job = self._jobs[peer]
        try:
            message = decode(kind, body)
        except ValueError:
            self.lost(peer)
            return
        self._handlers[type(message)](job, message)

    def lost(self, peer: Peer, _error: int = 0, _why: str = "") -> None:
        """Drop a job."""
        job = self._jobs.pop(peer)
        self._waiting.pop(job, None)
        job.close()

    def key_differs(self, hello: Hello) -> None:
        """Do nothing: the caller logs the error, and any stranger can cause it here."""

    turned_away = staticmethod(note_turned_away)

    def take_stranger(self, fd: int) -> None:
        """Answer an HTTP request."""
        if len(self._http) >= _MOST_HTTP:
            os.close(fd)
            return
        self._http.append(HttpCaller(self._selector, fd, self._state))

    # Requests.

    def _on_ask(self, job: Job, _message: Ask) -> None:
        is_lacking = job.name is not None and job.place is None and self._drains_until is None
        if is_lacking and not job.open_place():
            job.send(Reserved("", self._identity, job.entry))
        job.send(Status(as_text(self._state(job.key.number))))

    def _on_reserve(self, job: Job, wanted: Reserve) -> None:
        why = self._why_not(job, wanted) or job.open_place()
        job.name = job.name if why else wanted.job
        job.send(Reserved(why, self._identity, job.entry))

    def _on_meet(self, job: Job, meet: Meet) -> None:
        if job.name is None:  # must NOT wait: all waiting rosters together may be large
            self._end_turn(job, _UNRESERVED)
            return
        # Replaces a view of this job that waits: its workers have given that up.
        self._waiting[job] = meet, time.monotonic() + _MOST_WAIT_S
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        now = time.monotonic()
        for job, (meet, until) in list(self._waiting.items()):
            is_late = now >= until
            if is_late or job.pace.take(now):
                del self._waiting[job]
                self._end_turn(job, "" if is_late else self._serve(job, meet))

    def _end_turn(self, job: Job, why: str) -> None:
        """Send a job the place of its next view, and `why` this view is refused, if not empty."""
        if not why and (error := job.open_place()):  # NOT a refusal: this view is served
            _LOG.warning("job %r: cannot listen for its next view: %s", job.name, error)
        job.send(Reserved(why, self._identity, job.entry))

    def _why_not(self, job: Job, wanted: Reserve) -> str:
        """Return why this job is refused, or an empty string."""
        if wanted.version != own_version():
            return (
                f"it runs shoal {own_version()}, and the workers {wanted.version}: install "
                "the same on all"
            )
        if self._drains_until is not None:
            return "it is draining, and about to end"
        held = {other.key.number for other in self._jobs.values() if other.name is not None}
        held |= self._views.keys()
        if job.key.number not in held and len(held) >= self._most_jobs:
            return f"it serves {counted(len(held), 'job')}, the limit of --max-jobs"
        others = [one for one in self._jobs.values() if one.key is job.key and one is not job]
        n_others = sum(one.name is not None for one in others)
        if n_others >= _MOST_OF_KEY:
            return f"it serves {n_others} groups of jobs with this key, the limit for one key"
        return ""

    def _serve(self, job: Job, meet: Meet) -> str:
        """Start a process for a view; return why that failed, or an empty string."""
        if job.name is None or job.place is None:
            return _UNRESERVED
        if self._drains_until is not None:
            return "it is draining, and about to end"
        self._views.make_room(job.key.number, job.name, _MOST_VIEWS)
        self._views.make_room(job.key.number, None, _MOST_VIEWS_OF_KEY)
        try:
            pid, pipe = start(meet, job.key.path, self._memory_bytes, job.place.take())
            self._views.add(pid, pipe, job.key.number, job.name)
        except OSError as error:
            _LOG.warning("no child can be started for view %d: %s", meet.view, error)
            return f"it cannot start a process: {error.strerror}"
        _LOG.info("job %r: view %d is served by process %d", job.name, meet.view, pid)
        return ""

    def _state(self, key: int | None = None) -> dict[str, Any]:
        """Return the server's state, with the views of this key, or of all keys."""
        return {
            "version": own_version(),
            "is_draining": self._drains_until is not None,
            "n_jobs": len(self._views.keys()),
            "most_jobs": self._most_jobs,
            "memory_bytes": self._memory_bytes,
            "views": self._views.reports_of(key),
        }

    # Turns.

    def _try_turn(self) -> None:
        try:
            self._turn()
        except Exception:  # noqa: BLE001 - one peer's error must not affect other jobs
            _LOG.exception("a turn failed; the server goes on")
            time.sleep(_PAUSE_S)

    def _turn(self) -> None:
        now = time.monotonic()
        self._endpoint.step(now)
        self._views.expire(now)
        self._serve_waiting()
        for caller in self._http:
            if now >= caller.deadline:
                caller.close()
        self._http = [one for one in self._http if one.is_open]
        if self._drains_until is not None and (not self._views.n or now >= self._drains_until):
            self._ends = True
            return
        run_ready(self._selector, self._wake_at() - now)

    def _wake_at(self) -> float:
        times: list[float | None] = [one.deadline for one in self._http]
        times += [min(job.pace.next_at, until) for job, (_, until) in self._waiting.items()]
        times += [self._endpoint.deadline, self._views.next_deadline(), self._drains_until]
        return min(at for at in times if at is not None)

    def _on_signal(self, woken: socket.socket) -> None:
        for _ in woken.recv(64):
            self.drain()

    def _close(self) -> None:
        for job in self._jobs.values():
            job.close()
        for caller in self._http:
            caller.close()
        self._endpoint.close()
        self._views.kill_all()
        self._selector.close()
