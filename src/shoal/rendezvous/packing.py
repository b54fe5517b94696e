"""The encoding of records and rosters: short fields, one after the other, and a checksum.

Readers trust nothing: they compare each length with the bytes that are there, and raise ValueError
for anything that does not fit.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from shoal.engine import HANDSHAKE_VERSION

MAX_FIELD_BYTES: Final = 255
_HEAD: Final = struct.Struct("<8sH")
_CRC: Final = struct.Struct("<I")


def seal(kind: bytes, version: int, body: bytes) -> bytes:
    """Return a value of this kind and version with this body, and a checksum at the end.

    Without the checksum, one flipped bit in a version, a nonce or a key could end a job.
    """
    value = _HEAD.pack(kind, version) + body
    return value + _CRC.pack(zlib.crc32(value))


def unseal(kind: bytes, value: bytes) -> tuple[int, bytes]:
    """Return the version and body of a sealed value; ValueError if damaged or of another kind."""
    if len(value) < _HEAD.size + _CRC.size or not value.startswith(kind):
        raise ValueError("the value is of another kind")
    if zlib.crc32(value[: -_CRC.size]) != _CRC.unpack_from(value, len(value) - _CRC.size)[0]:
        raise ValueError("the value is damaged")
    return _HEAD.unpack_from(value)[1], value[_HEAD.size : -_CRC.size]


def unpack(kind: bytes, value: bytes) -> Unpacker:
    """Return the fields of a sealed value; ValueError also if it is of another version."""
    version, body = unseal(kind, value)
    if version != HANDSHAKE_VERSION:
        raise ValueError("the value is of another version")
    return Unpacker(body)


def field(data: bytes) -> bytes:
    """Return the data, at most 255 bytes, with its length before it."""
    return bytes((len(data),)) + data


def text_field(text: str) -> bytes:
    """Return a line as a field, cut if it is too long."""
    data = text.encode()[:MAX_FIELD_BYTES].decode(errors="ignore").encode()
    return field(data)


def number(value: int, n_bytes: int) -> bytes:
    """Return a number in little-endian bytes."""
    return value.to_bytes(n_bytes, "little")


class Unpacker:
    """Takes fields off the front of received data; every method raises ValueError if that fails."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, n_bytes: int) -> bytes:
        """Take the next `n_bytes` bytes."""
        at, self._at = self._at, self._at + n_bytes
        if self._at > len(self._data):
            raise ValueError("too short")
        return self._data[at : self._at]

    def number(self, n_bytes: int, low: int, high: int) -> int:
        """Take a number within these bounds."""
        value = int.from_bytes(self.take(n_bytes), "little")
        if not low <= value <= high:
            raise ValueError(value)
        return value

    def field(self) -> bytes:
        """Take the data of a `field`."""
        return self.take(self.take(1)[0])

    def text(self) -> str:
        """Take the text of a `text_field`: one line, since it is shown in logs and messages."""
        text = self.field().decode()
        if not text.isprintable():
            raise ValueError(text)
        return text

    def rest(self) -> bytes:
        """Take all remaining bytes."""
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        """Check that no bytes remain."""
        if not self.is_at_end:
            raise ValueError("too long")
