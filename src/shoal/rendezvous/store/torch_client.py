"""A client for a subset of the protocol of torch's TCPStore, for processes without torch."""

from __future__ import annotations

import socket
import struct
from typing import Final

from shoal.rendezvous.store import MAX_VALUE_BYTES

# torch/csrc/distributed/c10d/TCPStoreBackend.hpp; the same in torch 1.13 to 2.13. Every client of
# torch puts a slash before its keys.
_VALIDATE, _SET, _GET, _ADD, _CHECK = 0, 1, 3, 4, 5
_MAGIC: Final = 0x3C85F7CE
_LENGTH: Final = struct.Struct("<Q")


class TorchStoreClient:
    """A connection to a TCPStore. Any failure is an OSError, and ends it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            self._sock.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))
        except OSError:
            self._sock.close()
            raise

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def add(self, key: str) -> int:
        """Add one to a number, which begins at 0; return the sum."""
        self._sock.sendall(bytes([_ADD]) + _key(key) + struct.pack("<q", 1))
        return int(struct.unpack("<q", self._take(8))[0])

    def set(self, key: str, value: bytes) -> None:
        """Set a value, or overwrite it."""
        self._sock.sendall(bytes([_SET]) + _key(key) + _LENGTH.pack(len(value)) + value)

    def try_get(self, key: str) -> bytes | None:
        """Return the value, or None if it is not set."""
        self._sock.sendall(bytes([_CHECK]) + _LENGTH.pack(1) + _key(key))
        if self._take(1) != b"\0":
            return None
        self._sock.sendall(bytes([_GET]) + _key(key))
        (n_bytes,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if n_bytes > MAX_VALUE_BYTES:
            raise OSError(f"the store answers with {n_bytes} bytes")
        return self._take(n_bytes)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()

    def _take(self, n_bytes: int) -> bytes:
        data = b""
        while len(data) < n_bytes:
            more = self._sock.recv(n_bytes - len(data))
            if not more:
                raise ConnectionResetError("the store has closed the connection")
            data += more
        return data


def _key(key: str) -> bytes:
    data = b"/" + key.encode()
    return _LENGTH.pack(len(data)) + data
