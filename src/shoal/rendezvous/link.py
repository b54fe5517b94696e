"""An authenticated connection of a group that is still forming, to the rank above or to one below.

Stepped by the join loop when its socket is ready, never blocks, and raises OSError when it is of no
use any more. `close` is idempotent.
"""

from __future__ import annotations

import array
import errno
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shoal.engine import HANDSHAKE_MAGIC, HANDSHAKE_VERSION
from shoal.errors import UsageError
from shoal.rendezvous.roster import MAX_ENTRY_BYTES

_REPORT, _INTRODUCTION, _WAITING = range(8, 11)  # after the kinds of the handshake
_FORM: Final = struct.Struct("<8sHHI")  # magic, version, kind; how many bytes, or which rank
_N_MAC_BYTES: Final = hashlib.sha256().digest_size
_ROOM: Final = socket.CMSG_SPACE(array.array("i").itemsize)
_AT_ONCE: Final = 1 << 16  # bytes of a report for which there is room before they are there


class Ends(NamedTuple):
    """What the two ends of a link may say to each other.

    Args:
        rank: the other end's.
        own_key: seals the report that we send.
        key: seals the report that we receive.
        is_above: whether the other end is the upper one.
        n_told: of how many ranks the report that we receive tells.
        n_local: the other end is our host leader, and so many ranks are on our host; 0: it is not.
        size: of the group.
    """

    rank: int
    own_key: bytes
    key: bytes
    is_above: bool
    n_reported: int
    n_local: int
    size: int


class TreeLink:
    """An authenticated connection, until both ends have sent their report.

    The report of the lower end stands for it and all below it: they lack nothing, and it says what
    all others must know of them (roster.py). The report of the upper end stands for all ranks.
    Before them, inside a host, the upper end passes the memory that its ranks share
    (links.py).
    """

    def __init__(self, sock: socket.socket, ends: Ends) -> None:
        self.rank = ends.rank
        self.sock = sock
        self.is_local = sock.family == socket.AF_UNIX
        self.report: bytes | None = None  # that has come
        self.waits_for: int | None = None  # see `say_waiting`
        self.has_reported = False  # our report: nothing else is said after it
        self._ends = ends
        self._memory_fd: int | None = None  # that has come and was not taken; -1: of nothing
        self._is_introduced = not ends.n_local
        self._inbox = bytearray()
        self._n_report_bytes: int | None = None  # of that which is on its way, seal included
        self._outbox = b""

    @property
    def is_open(self) -> bool:
        """Whether it is of use: what is to come over it before the report has been taken."""
        return self._is_introduced

    @property
    def has_more_to_send(self) -> bool:
        """Whether `flush` is to be called once the socket can be written."""
        return bool(self._outbox)

    def take_memory(self) -> int | None:
        """The descriptor that the peer has passed, once; it is the caller's from here on."""
        fd, self._memory_fd = self._memory_fd, None
        self._is_introduced |= fd is not None
        return fd

    def introduce(self, memory_fd: int, n_local: int) -> None:
        """Pass the peer the memory that so many ranks of its host share; -1: there is none."""
        self._post(_INTRODUCTION, n_local, memory_fd)

    def send_waiting(self, rank: int) -> None:
        """Tell the peer of a rank that is not linked to the one above it, so that all must wait."""
        self._post(_WAITING, rank)

    def send_report(self, report: bytes) -> None:
        """Send our report, or as much of it as the socket takes now."""
        self.has_reported = True
        head = _FORM.pack(HANDSHAKE_MAGIC, HANDSHAKE_VERSION, _REPORT, len(report))
        self._outbox = head + report + hmac.digest(self._ends.own_key, head + report, "sha256")
        self.flush()

    def flush(self) -> None:
        """Send what the socket did not take before."""
        try:
            self._outbox = self._outbox[self.sock.send(self._outbox) :]
        except BlockingIOError:
            return

    def step(self) -> None:
        """Go as far as possible without waiting; nothing is read beyond the report of who is above.

        Of one below the end of the connection is still of interest.
        """
        try:
            while self.report is None or not self._ends.is_above:
                if self._n_report_bytes is None:
                    self._take_message()
                else:
                    self._take_report(self._n_report_bytes)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the connection and what came over it."""
        self.sock.close()
        fd, self._memory_fd = self._memory_fd, None
        if fd is not None and fd >= 0:
            os.close(fd)

    def _post(self, kind: int, value: int = 0, fd: int = -1) -> None:
        message = _FORM.pack(HANDSHAKE_MAGIC, HANDSHAKE_VERSION, kind, value)
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
            if (magic, version) != (HANDSHAKE_MAGIC, HANDSHAKE_VERSION):
                raise ConnectionError("not a message that is due")
            self._take(kind, value, fds)
            if kind != _REPORT:
                self._inbox.clear()
        except (struct.error, OSError) as error:
            _close_all(fds)
            why = getattr(error, "strerror", None) or "it spoke out of turn"
            raise ConnectionResetError(errno.ECONNRESET, why) from error

    def _take(self, kind: int, value: int, fds: Sequence[int]) -> None:
        """Act on one message; raises if it is not its turn."""
        is_early = self.report is None
        if kind == _REPORT and is_early and self.is_open and not fds:
            if value > self._ends.n_reported * MAX_ENTRY_BYTES:
                raise ConnectionError(errno.EPROTO, f"it announced a report of {value} bytes")
            self._n_report_bytes = _FORM.size + value + _N_MAC_BYTES
        elif kind == _INTRODUCTION and not self.is_open and len(fds) <= 1:
            self._take_introduction(value, fds)
        elif kind == _WAITING and is_early and value < self._ends.size and not fds:
            self.waits_for = value
        else:
            raise ConnectionError("not a message that is due")

    def _take_introduction(self, n_local: int, fds: Sequence[int]) -> None:
        expected = self._ends.n_local
        if n_local != expected:
            why = f"it introduced {n_local} ranks of this host, and there are {expected}"
            raise ConnectionError(errno.EPROTO, why)
        if self._memory_fd is not None:
            raise ConnectionError("not a message that is due")
        self._memory_fd = fds[0] if fds else -1

    def _take_report(self, n_bytes: int) -> None:
        data = self.sock.recv(min(n_bytes - len(self._inbox), _AT_ONCE))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self._inbox += data
        if len(self._inbox) < n_bytes:
            return
        said, mac = self._inbox[:-_N_MAC_BYTES], self._inbox[-_N_MAC_BYTES:]
        if not hmac.compare_digest(hmac.digest(self._ends.key, said, "sha256"), mac):
            raise ConnectionResetError(errno.ECONNRESET, "its report was damaged in transit")
        self.report, self.waits_for = bytes(said[_FORM.size :]), None
        self._inbox.clear()
        self._n_report_bytes = None

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
