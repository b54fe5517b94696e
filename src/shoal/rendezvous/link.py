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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.rendezvous.door import peer_uid
from shoal.rendezvous.handshake import MAGIC, VERSION, ClientHandshake, Progress
from shoal.rendezvous.listener import unix_address

if TYPE_CHECKING:
    from shoal.rendezvous.record import Endpoint

MAX_FDS: Final = 16  # a link needs a memory and an eventfd; far below the kernel's 253 (unix(7))
_FDS, _READY = 7, 8  # the message kinds after those of the handshake
_FDS_FORM: Final = struct.Struct("<8sHHI")  # magic, version, kind, how many
_READY_MESSAGE: Final = struct.pack("<8sHH", MAGIC, VERSION, _READY)


class Dial:
    """One attempt to reach a peer: connect, then prove the key to it."""

    def __init__(self, rank: int, target: Endpoint | str, handshake: ClientHandshake) -> None:
        self.rank = rank
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

    Inside a host the ends first pass each other their descriptors. Each says READY once all its
    links are open, and settles when it hears the same. Nothing beyond READY is read.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.is_local = sock.family == socket.AF_UNIX
        self.is_settled = False
        self._fds: tuple[int, ...] | None = None if self.is_local else ()
        self._inbox = b""
        self._has_said_ready = False

    @property
    def is_open(self) -> bool:
        """Whether it is of use: proven, and the peer's descriptors are here."""
        return self._fds is not None

    def offer(self, fds: Sequence[int]) -> None:
        """Pass our descriptors, if the peer is on this host."""
        if not self.is_local:
            return
        message = _FDS_FORM.pack(MAGIC, VERSION, _FDS, len(fds))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        if self.sock.sendmsg([message], rights) != len(message):
            raise ConnectionError(errno.ENOBUFS, "the socket does not take 16 bytes")

    def say_ready(self) -> None:
        """Tell the peer, once, that all our links are open."""
        if not self._has_said_ready:
            self._has_said_ready = True
            if self.sock.send(_READY_MESSAGE) != len(_READY_MESSAGE):
                raise ConnectionError(errno.ENOBUFS, "the socket does not take 12 bytes")

    def step(self) -> None:
        """Go as far as possible without waiting."""
        try:
            if not self.is_open:
                self._fds = self._receive()
            while not self.is_settled:
                data = self.sock.recv(len(_READY_MESSAGE) - len(self._inbox))
                self._inbox += data
                if not data or not _READY_MESSAGE.startswith(self._inbox):
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
                self.is_settled = self._inbox == _READY_MESSAGE
        except BlockingIOError:
            return

    def detach(self) -> tuple[int, tuple[int, ...]]:
        """The socket's descriptor and the peer's, which are the caller's from here on."""
        fds, self._fds = self._fds or (), None
        return self.sock.detach(), fds

    def close(self) -> None:
        """Close the connection and what came over it."""
        self.sock.close()
        fds, self._fds = self._fds or (), None
        for fd in fds:
            os.close(fd)

    def _receive(self) -> tuple[int, ...]:
        # socket.recv_fds ignores its flags in the Pythons we support, and without MSG_CMSG_CLOEXEC
        # a child process that is started now would inherit what arrives.
        room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        data, controls, flags, _ = self.sock.recvmsg(_FDS_FORM.size, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if data == _FDS_FORM.pack(MAGIC, VERSION, _FDS, len(fds)):
            return tuple(fds)
        for fd in fds:
            os.close(fd)
        if flags & socket.MSG_CTRUNC:
            raise UsageError(
                f"no file descriptor left for what rank {self.rank} passes us: raise `ulimit -n`"
            )
        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")


def _family(target: Endpoint | str) -> socket.AddressFamily:
    if isinstance(target, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in target.address else socket.AF_INET
