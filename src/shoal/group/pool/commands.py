"""What the lowest worker has all do, one thing after another, and how the others hear of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.group.pool.protocol import Meet, Reserve, own_version
from shoal.group.pool.watch import Watch
from shoal.rendezvous import TcpStoreClient, TcpStoreServer
from shoal.rendezvous.interface import choose_address
from shoal.rendezvous.listener import port_range
from shoal.rendezvous.store.server import StoreLimits

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.control import Control
    from shoal.group.pool.pool import ServerPool
    from shoal.group.pool.pool_view import PoolView
    from shoal.group.pool.stages import Stages

_LOG: Final = logging.getLogger("shoal")

_LOOK_S: Final = 0.05  # how often the lowest worker looks whether a view has ended
_LISTEN_S: Final = 0.5  # how often the others look whether the world has
_CONNECT_S: Final = 10.0
_SETTLE_S: Final = 0.1
_LEAST_PAUSE_S: Final = 0.25  # until servers that did not come are asked again; twice as long then
_LONGEST_PAUSE_S: Final = 8.0
_N_VALUES: Final = 1 << 20  # commands in the life of a job: one every 10 s for 100 days


class LeaderGone(ShoalError):  # noqa: N818 - says what happened
    """The lowest worker has left, and with it the store."""


class Form(NamedTuple):
    """Form a view with these servers, by their places in `SHOAL_SERVERS`, at this store."""

    view: int
    servers: tuple[int, ...]
    host: str
    port: int

    def run(self, pool: ServerPool) -> None:
        """Do it."""
        pool.form(self)


class End(NamedTuple):
    """End a view: once its calls have ended, or at once, as a server of it is lost."""

    view: int
    is_lost: bool

    def run(self, pool: ServerPool) -> None:
        """Do it."""
        pool.end(self)


Command = Form | End


def encode(command: Command) -> bytes:
    """As it lies in the store."""
    if isinstance(command, End):
        return f"end {command.view} {int(command.is_lost)}".encode()
    servers = ",".join(map(str, command.servers))
    return f"form {command.view} {servers} {command.host} {command.port}".encode()


def decode(value: bytes) -> Command:
    """What `encode` wrote; ValueError for anything else."""
    word, *rest = value.decode().split(" ")
    if word == "end":
        view, is_lost = map(int, rest)
        return End(view, bool(is_lost))
    if word != "form":
        raise ValueError(word)
    number, servers, host, port = rest
    return Form(int(number), tuple(map(int, servers.split(","))), host, int(port))


class Commands(Protocol):
    """Where a worker's thread gets them from."""

    def begin(self, control: Control) -> None:
        """Find each other; all workers call it."""

    def next(self, views: Sequence[PoolView], stages: Stages[PoolView]) -> Command | None:
        """The next one; None if there is none yet. Waits a little.

        Raises:
            ShoalError: there will be none any more.
        """

    def invite(self, command: Form, n_workers: int) -> None:
        """Have the servers come."""

    def formed(self, command: Form) -> None:
        """A view stands."""

    def failed(self, command: Form, why: str, misplaced: int = -1) -> None:
        """It does not.

        Args:
            why: empty if only others failed.
            misplaced: the place in the view of a server that can never be in one; -1: none.
        """

    def look(self) -> None:
        """Something may have ended."""

    def trouble(self) -> str:
        """Which servers do not serve, and why, in words."""

    def close(self) -> None:
        """Stop; idempotent, from any thread."""


class Follower:
    """The commands as all workers but the lowest hear them."""

    def __init__(self, key: bytes) -> None:
        self._key, self._n = key, 0
        self._client: TcpStoreClient | None = None
        self._is_closed = False

    def begin(self, control: Control) -> None:
        """Connect to the store of the lowest."""
        where = control.tell("")
        if not where:
            raise ShoalError("rank 0 cannot serve a store")
        host, port = where.split(" ")
        client = TcpStoreClient(host, int(port), timeout_s=_CONNECT_S, key=self._key)
        self._client = client
        if self._is_closed:
            client.close()

    def next(self, views: Sequence[PoolView], stages: Stages[PoolView]) -> Command | None:
        """Wait for it for half a second."""
        del views, stages
        if self._client is None:
            return None
        try:
            value = self._client.get(f"command/{self._n}", _LISTEN_S)
        except TimedOut:
            return None
        except PeerLost as lost:
            raise LeaderGone(str(lost)) from lost
        self._n += 1
        return decode(value)

    def invite(self, command: Form, n_workers: int) -> None:
        """Rank 0 does."""

    def formed(self, command: Form) -> None:
        """Nothing to do."""

    def failed(self, command: Form, why: str, misplaced: int = -1) -> None:
        """Rank 0 sees to it."""
        del misplaced
        if why:
            _LOG.info("view %d of the servers did not form: %s", command.view, why)

    def look(self) -> None:
        """Rank 0 sees it."""

    def trouble(self) -> str:
        """Rank 0 knows."""
        return ""

    def close(self) -> None:
        """Wake whoever waits for a command."""
        self._is_closed = True
        if self._client is not None:
            self._client.close()


class Leader:
    """The lowest worker decides."""

    def __init__(self, servers: Sequence[Address], key: bytes) -> None:
        self._servers, self._key = servers, key
        self._woken = threading.Event()
        self._watch: Watch | None = None
        self._commands: TcpStoreServer | None = None
        self._client: TcpStoreClient | None = None
        self._meeting: TcpStoreServer | None = None
        self._host = ""
        self._n = self._n_views = self._n_failures = 0
        self._not_before, self._pause_s = 0.0, _LEAST_PAUSE_S
        self._seen: list[Address] = []
        self._misplaced: dict[Address, str] = {}
        self._invited: set[Address] = set()
        self._has_lost_invited = False
        self._seen_at = 0.0
        self._is_closed = False

    def begin(self, control: Control) -> None:
        """Serve the store, and say where."""
        try:
            self._host = choose_address(os.environ.get("MASTER_ADDR")).address
            self._commands = self._serve_store(StoreLimits(n_values=_N_VALUES))
        except ShoalError:
            control.tell("")  # the others wait for it
            raise
        port = self._commands.port
        self._client = TcpStoreClient(self._host, port, timeout_s=_CONNECT_S, key=self._key)
        control.tell(f"{self._host} {port}")
        job = f"{control.name.split('/')[0]} of {self._host}"
        reserve = Reserve(own_version(), job, control.size)
        self._watch = Watch(self._servers, self._key, reserve, self._changed)
        if self._is_closed:
            self.close()

    def next(self, views: Sequence[PoolView], stages: Stages[PoolView]) -> Command | None:
        """Look at the views and the servers, and wait a little if all is well."""
        command = self._ending(views, stages) or self._forming(stages)
        if command is None:
            self._woken.wait(_LOOK_S)
            self._woken.clear()
            return None
        if self._client is None:
            return None
        self._client.set(f"command/{self._n}", encode(command))
        self._n += 1
        return command

    def _ending(self, views: Sequence[PoolView], stages: Stages[PoolView]) -> End | None:
        gone = self._watch.gone() if self._watch is not None and views else set[object]()
        for view in views:
            if view.has_ended or not gone.isdisjoint(view.servers):
                return End(view.number, is_lost=True)
            if view.end is not None and view.is_idle(stages.next_number):
                return End(view.number, is_lost=False)
        return None

    def _forming(self, stages: Stages[PoolView]) -> Command | None:
        if self._watch is None or time.monotonic() < self._not_before:
            return None
        last = stages.last
        wanted = [one for one in self._watch.ready() if one not in self._misplaced]
        if self._is_unsettled(wanted):
            return None
        if wanted == (list(last.servers) if last is not None else []):
            return None
        if not wanted and last is not None:
            return End(last.number, is_lost=False)
        if self._n_failures > 1 and len(wanted) > 1:
            # One of them may be what nobody can reach: each in turn is left out.
            del wanted[self._n_failures % len(wanted)]
        self._n_views += 1
        self._meeting = self._serve_store(StoreLimits())
        places = tuple(self._servers.index(address) for address in wanted)
        return Form(self._n_views, places, self._host, self._meeting.port)

    def _is_unsettled(self, wanted: list[Address]) -> bool:
        """Whether others may be about to come: then one view is formed for all of them."""
        now = time.monotonic()
        if wanted != self._seen:
            self._seen, self._seen_at = wanted, now
        return len(wanted) < len(self._servers) and now < self._seen_at + _SETTLE_S

    def invite(self, command: Form, n_workers: int) -> None:
        """Have the servers come."""
        size = n_workers + len(command.servers)
        where = command.host, command.port
        meets = [
            (self._servers[place], Meet(command.view, n_workers, n_workers + at, size, *where))
            for at, place in enumerate(command.servers)
        ]
        self._invited, self._has_lost_invited = {address for address, _ in meets}, False
        if self._watch is not None:
            self._watch.meet(meets)

    def _changed(self) -> None:
        """A server has come or gone; on the thread that watches."""
        if self._watch is not None and not self._invited.isdisjoint(self._watch.gone()):
            self._has_lost_invited = True
            self._close_meeting()  # whoever waits there for it need not wait until time is up
        self.look()

    def formed(self, command: Form) -> None:
        """Ask at once should there be others."""
        del command
        self._invited = set()
        self._close_meeting()
        if self._n_failures > 1:  # with one left out, perhaps: not at once again with it
            self._not_before = time.monotonic() + _LONGEST_PAUSE_S
        self._n_failures, self._pause_s = 0, _LEAST_PAUSE_S

    def failed(self, command: Form, why: str, misplaced: int = -1) -> None:
        """Wait, longer each time; without a server that can never be used."""
        self._invited = set()
        self._close_meeting()
        if misplaced >= 0:
            address = self._servers[command.servers[misplaced]]
            self._misplaced[address] = why
            _LOG.warning("server %s is not used: %s", address, why)
            return
        if self._has_lost_invited:
            _LOG.info("view %d did not form: a server was lost meanwhile", command.view)
            return
        _LOG.warning(
            "view %d of the servers did not form: %s; tried again in %.3g s",
            *(command.view, why or "another worker says why", self._pause_s),
        )
        self._n_failures += 1
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def look(self) -> None:
        """Wake the thread."""
        self._woken.set()

    def trouble(self) -> str:
        """Which servers do not serve, and why."""
        watch = self._watch
        trouble = {} if watch is None else {**watch.trouble(), **self._misplaced}
        return "; ".join(f"{address} {why}" for address, why in trouble.items())

    def close(self) -> None:
        """Leave the servers, and end the stores."""
        self._is_closed = True
        self._woken.set()
        if self._watch is not None:
            self._watch.close()
        if self._client is not None:
            self._client.close()
        self._close_meeting()
        if self._commands is not None:
            with contextlib.suppress(OSError):
                self._commands.close()

    def _serve_store(self, limits: StoreLimits) -> TcpStoreServer:
        """A store at a port that may be used."""
        for port in port_range(os.environ):
            with contextlib.suppress(UsageError):
                return TcpStoreServer(self._host, port, key=self._key, limits=limits)
        raise UsageError(f"no port of SHOAL_PORT_RANGE is free at {self._host}; widen it")

    def _close_meeting(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
