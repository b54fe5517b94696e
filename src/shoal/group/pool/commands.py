"""The commands of the lowest worker to all pool threads, and how the others read them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import PeerLost, ShoalError, TimedOut
from shoal.group.pool.addresses import Address, parse_address
from shoal.rendezvous.store.client import TcpStoreClient

if TYPE_CHECKING:
    from shoal.group.pool.control import Control
    from shoal.group.pool.stages import Stages
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

_LISTEN_S: Final = 0.5  # how often the others look whether the world has
_AGAIN_S: Final = 0.1  # no store that ends each connection at once is asked more often
_CONNECT_S: Final = 2.0  # meanwhile nobody looks at deadlines
MEETING_S: Final = 3.0
"""For a view to form: a server that was there a moment ago, and is gone, holds all up this long."""

Unheard = Mapping[int, Sequence[int]]
"""By a server's place in a view, the workers that have not heard its first word."""


class Form(NamedTuple):
    """Form a view with these servers, which meet the workers at this store."""

    view: int
    servers: tuple[Address, ...]
    host: str
    port: int


class End(NamedTuple):
    """End a view: once its calls have ended, or at once if a server of it is lost."""

    view: int
    is_lost: bool


Command = Form | End


def encode(command: Command) -> bytes:
    """Return the command as it lies in the store."""
    if isinstance(command, End):
        return f"end {command.view} {int(command.is_lost)}".encode()
    servers = ",".join(map(str, command.servers))
    return f"form {command.view} {servers} {command.host} {command.port}".encode()


def decode(value: bytes) -> Command:
    """Return the command that `encode` wrote; ValueError for anything else."""
    word, *rest = value.decode().split(" ")
    if word == "end":
        view, is_lost = map(int, rest)
        return End(view, bool(is_lost))
    if word != "form":
        raise ValueError(word)
    number, servers, host, port = rest
    named = tuple(parse_address(each, "a server") for each in servers.split(","))
    return Form(int(number), named, host, int(port))


class Commands:
    """The source of a worker's commands. What only rank 0 does, nothing does on other workers."""

    def begin(self, control: Control) -> None:
        """Find the other workers; all call it."""
        raise NotImplementedError

    def next(self, views: Sequence[View], stages: Stages[View], lowest_open: int) -> Command | None:
        """Return the next command, or None if there is none yet. Waits a little.

        Args:
            lowest_open: the lowest call that this worker may yet make.

        Raises:
            ShoalError: no command will come any more.
        """
        raise NotImplementedError

    def invite(self, command: Form, n_workers: int) -> None:
        """Ask the servers into a view."""

    def formed(self, view: View, steps: bytes) -> None:
        """Called when a view stands.

        Args:
            steps: by server, how far below a worker's its rate was measured to be.
        """

    def failed(self, command: Form, why: str, misplaced: int, unheard: Unheard) -> None:
        """Called when a view did not form.

        Args:
            why: empty if only other workers failed.
            misplaced: the place in the view of a server that can never be in one; -1: none.
        """

    def note(self, view: int, kind: str, how: str) -> None:
        """Send the servers how a kind of call is made."""

    def look(self) -> None:
        """Called when a view may have ended."""

    def trouble(self) -> str:
        """Return which servers do not serve, and why; only rank 0 knows."""
        return ""

    def close(self) -> None:
        """Stop; idempotent, from any thread."""
        raise NotImplementedError


class Follower(Commands):
    """The commands as rank 0 writes them to its store, for all other workers.

    Rank 0 may be silent for as long as it lives, for example while a call holds its interpreter:
    what it has written is still there afterwards. The native heartbeat alone judges whether it
    lives; once it does not, `control` has ended.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._n = key, 0
        self._client: TcpStoreClient | None = None
        self._where = ""
        self._is_silent = False
        self._closing = threading.Event()

    def begin(self, control: Control) -> None:
        """Find out where the store of the lowest is."""
        self._control = control
        self._where = control.tell("")
        if not self._where:
            raise ShoalError("rank 0 cannot serve a store")

    def _connect(self) -> None:
        """Connect to the store, if it answers."""
        host, port = self._where.split(" ")
        try:
            client = TcpStoreClient(
                *(host, int(port)),
                timeout_s=_CONNECT_S,
                key=self._key,
                is_wanted=lambda: not self._closing.is_set() and self._control.ended() is None,
            )
        except ShoalError as error:
            self._miss(error)
            return
        self._client, self._is_silent = client, False
        if self._closing.is_set():
            client.close()

    def _miss(self, why: ShoalError) -> None:
        """Log the first of a row of failures."""
        if not (self._is_silent or self._closing.is_set() or self._control.ended() is not None):
            _LOG.info("%s: no change of servers until rank 0 answers: %s", self._control, why)
            self._is_silent = True
        self._closing.wait(_AGAIN_S)

    def next(self, views: Sequence[View], stages: Stages[View], lowest_open: int) -> Command | None:
        """Wait for it for half a second."""
        del views, stages, lowest_open
        if self._client is None:
            self._connect()
        if self._client is None:
            return None
        try:
            value = self._client.get(f"command/{self._n}", _LISTEN_S)
        except TimedOut:
            return None
        except PeerLost:
            self._client = None
            self._closing.wait(_AGAIN_S)
            return None
        self._n += 1
        return decode(value)

    def failed(self, command: Form, why: str, misplaced: int, unheard: Unheard) -> None:
        """Log why, unless rank 0 blames a server and logs that."""
        del misplaced
        if why and not unheard:
            _LOG.info("view %d of the servers did not form: %s", command.view, why)

    def close(self) -> None:
        """End the wait for a command."""
        self._closing.set()
        client = self._client
        if client is not None:
            client.close()
