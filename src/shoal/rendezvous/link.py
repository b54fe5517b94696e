"""One connection of a group that is still forming: dialled, proven, then linked.

Both classes are stepped by the join loop when their socket is ready, never block, and raise
OSError when the connection is of no use any more. `close` is idempotent.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from shoal.errors import UsageError
from shoal.rendezvous.door import peer_uid
from shoal.rendezvous.handshake import MAGIC, VERSION, ClientHandshake, Progress
from shoal.rendezvous.listener import unix_address
from shoal.rendezvous.record import Endpoint

_READY, _INTRODUCTION, _WAITING = range(8, 11)  # after the kinds of the handshake
_FORM: Final = struct.Struct("<8sHHI")  # magic, version, kind; how many, or which rank
_MAX_PORT: Final = 65535
_ROOM: Final = socket.CMSG_SPACE(array.array("i").itemsize)


class Dial:
    """One attempt to reach a peer: connect, then prove the key to it."""

    def __init__(
        self, rank: int, path: int, target: Endpoint | str, handshake: ClientHandshake
    ) -> None:
        self.rank = rank
        self.path = path
        self._target = target
        self._handshake = handshake
        self._is_connected = False
        self.sock = socket.socket(_family(target), socket.SOCK_STREAM)
        self.sock.setblocking(False)

    def start(self) -> None:
        """Begin to connect; the socket turns writable once that is settled."""
        target = self._target
        if isinstance(target, str):
            # Refused or done at once; EAGAIN if the peer's backlog is full: try later.
            self.sock.connect(unix_address(target))
            return
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        status = self.sock.connect_ex((target.address, target.port))
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, so that it is for reading from here on."""
        return self._is_connected

    def step(self) -> Progress:
        """Go as far as possible without waiting."""
        if not self._is_connected:
            self._greet()
        while self._handshake.wants:
            try:
                data = self.sock.recv(self._handshake.wants)
            except BlockingIOError:
                break
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._send(self._handshake.feed(data))
        return self._handshake.progress

    def close(self) -> None:
        """Give the attempt up."""
        self.sock.close()

    def _greet(self) -> None:
        status = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        if self.sock.family == socket.AF_UNIX and peer_uid(self.sock) != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        self._is_connected = True
        self._send(self._handshake.hello)

    def _send(self, message: bytes) -> None:
        if message and self.sock.send(message) != len(message):
            raise ConnectionError(errno.ENOBUFS, "the socket does not take 44 bytes")


class Link:
    """A proven connection, until both ends know that the whole group stands.

    Inside a host the lowest rank introduces the others: it passes each the memory that they share
    (introduce.py). Each end says READY once all its links are open, and settles when it hears the
    same. Nothing beyond READY is read.

    Args:
        to_come: the ranks whom we find in the memory that the peer is to pass us, itself included.
        n_paths: how many connections there are to be, this one included.
    """

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        to_come: Set[int] = frozenset(),
        n_paths: int = 1,
    ) -> None:
        self.rank = rank
        self.sock = sock
        self.n_paths = n_paths
        self._more: dict[int, socket.socket] = {}  # by path; `sock` is path 0
        self.is_local = sock.family == socket.AF_UNIX
        self.is_settled = False
        self.waits_for: int | None = None  # whom the peer lacks to introduce us
        self.listens_at: Endpoint | None = None  # where the peer can be asked to dial us again
        self._to_come = to_come
        self._memory_fd: int | None = None  # that has come and was not taken; -1: of nothing
        self._is_introduced = not to_come
        self._inbox = b""
        self._has_said_ready = False

    @property
    def is_open(self) -> bool:
        """Whether it is of use: proven, and what is to come over it has been taken."""
        return len(self._more) == self.n_paths - 1 and self._is_introduced

    @property
    def next_path(self) -> int:
        """The first path that is not there, or `n_paths`."""
        return next(path for path in range(1, self.n_paths + 1) if path not in self._more)

    def add_path(self, path: int, sock: socket.socket) -> bool:
        """Keep another proven connection to the peer, in the place of one it has given up."""
        if not 1 <= path < self.n_paths or self._has_said_ready:
            return False
        if path in self._more:
            self._more[path].close()
        self._more[path] = sock
        return True

    @property
    def introduced(self) -> Set[int]:
        """Whom the peer has introduced."""
        return self._to_come if self._is_introduced else frozenset()

    def take_memory(self) -> int | None:
        """The descriptor that the peer has passed, once; it is the caller's from here on."""
        fd, self._memory_fd = self._memory_fd, None
        self._is_introduced |= fd is not None
        return fd

    @property
    def address(self) -> str:
        """The far end, see `PeerInfo.address`."""
        if self.is_local:
            return "unix"
        try:
            host, port = self.sock.getpeername()[:2]
        except OSError:  # it has gone in this very moment; the engine will find out
            return "gone"
        return str(Endpoint(host, port, ""))

    def introduce(self, memory_fd: int, n_local: int) -> None:
        """Pass the peer the memory that so many ranks of its host share; -1: there is none."""
        self._say(_INTRODUCTION, n_local, memory_fd)

    def say_waiting(self, rank: int) -> None:
        """Tell the peer whom we lack to introduce it to the others."""
        self._say(_WAITING, rank)

    def say_ready(self, ports: Mapping[str, int]) -> None:
        """Tell the peer, once, that all our links are open.

        Args:
            ports: by our address, where we listen for other hosts.
        """
        if not self._has_said_ready:
            self._has_said_ready = True
            own = "" if self.is_local else self.sock.getsockname()[0]
            self._say(_READY, ports.get(own, 0))

    def step(self) -> None:
        """Go as far as possible without waiting."""
        try:
            while not self.is_settled:
                self._take_message()
        except BlockingIOError:
            return

    def detach_more(self) -> tuple[int, ...]:
        """The sockets of all paths but the first, which are the caller's from here on."""
        more, self._more = self._more, {}
        return tuple(more[path].detach() for path in sorted(more))

    def detach(self) -> int:
        """The socket of the first path, which is the caller's from here on."""
        return self.sock.detach()

    def close(self) -> None:
        """Close the connection and what came over it."""
        self.sock.close()
        for sock in self._more.values():
            sock.close()
        fd, self._memory_fd = self._memory_fd, None
        if fd is not None and fd >= 0:
            os.close(fd)

    def _say(self, kind: int, value: int = 0, fd: int = -1) -> None:
        message = _FORM.pack(MAGIC, VERSION, kind, value)
        fds = array.array("i", [fd])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fd >= 0 else []
        if self.sock.sendmsg([message], rights) != len(message):
            raise ConnectionError(errno.ENOBUFS, f"the socket does not take {len(message)} bytes")

    def _take_message(self) -> None:
        data, fds = self._receive(_FORM.size - len(self._inbox))
        self._inbox += data
        try:
            if len(self._inbox) < _FORM.size and not fds:
                return
            magic, version, kind, value = _FORM.unpack(self._inbox)
            self._inbox = b""
            if (magic, version) != (MAGIC, VERSION):
                raise ConnectionError("not a message that is due")
            self._take(kind, value, fds)
        except (struct.error, OSError) as error:
            _close_all(fds)
            why = getattr(error, "strerror", None) or "it spoke out of turn"
            raise ConnectionResetError(errno.ECONNRESET, why) from error

    def _take(self, kind: int, value: int, fds: Sequence[int]) -> None:
        """Act on one message; raises if it is not its turn."""
        if kind == _READY and self.is_open and not fds and value <= _MAX_PORT:
            self.is_settled = True
            if value and not self.is_local:
                self.listens_at = Endpoint(self.sock.getpeername()[0], value, "")
        elif kind == _INTRODUCTION and not self.is_open and len(fds) <= 1:
            self._take_introduction(value, fds)
        elif kind == _WAITING and value in self._to_come and not fds:
            self.waits_for = value
        else:
            raise ConnectionError("not a message that is due")

    def _take_introduction(self, n_local: int, fds: Sequence[int]) -> None:
        expected = 1 + len(self._to_come)
        if n_local != expected:
            why = f"it introduced {n_local} ranks of this host, and there are {expected}"
            raise ConnectionError(errno.EPROTO, why)
        if self._memory_fd is not None:
            raise ConnectionError("not a message that is due")
        self._memory_fd = fds[0] if fds else -1

    def _receive(self, n_bytes: int) -> tuple[bytes, Sequence[int]]:
        # socket.recv_fds ignores its flags in the Pythons we support, and without MSG_CMSG_CLOEXEC
        # a child process that is started now would inherit what arrives.
        data, controls, flags, _ = self.sock.recvmsg(n_bytes, _ROOM, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            _close_all(fds)
            raise UsageError(
                f"no file descriptor left for what rank {self.rank} passes us: raise `ulimit -n`"
            )
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return data, fds


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _family(target: Endpoint | str) -> socket.AddressFamily:
    if isinstance(target, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in target.address else socket.AF_INET
