"""How records and rosters are written: short fields, one after the other, and a checksum.

Whoever reads them takes nothing for granted: no length is believed before it is compared with what
is there, and whatever does not fit is a ValueError.
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
    """These bytes as a value of this kind and version, with a checksum at the end.

    Without it one flipped bit could make a version, a nonce or a key another one, and end a job
    for that.
    """
    value = _HEAD.pack(kind, version) + body
    return value + _CRC.pack(zlib.crc32(value))


def unseal(kind: bytes, value: bytes) -> tuple[int, bytes]:
    """Return the version and body of a value of `seal`; ValueError if it is another or damaged."""
    if len(value) < _HEAD.size + _CRC.size or not value.startswith(kind):
        raise ValueError("of another kind")
    if zlib.crc32(value[: -_CRC.size]) != _CRC.unpack_from(value, len(value) - _CRC.size)[0]:
        raise ValueError("damaged")
    return _HEAD.unpack_from(value)[1], value[_HEAD.size : -_CRC.size]


def unpack(kind: bytes, value: bytes) -> Unpacker:
    """Return the fields of a value of `seal`; ValueError also if it is of another version."""
    version, body = unseal(kind, value)
    if version != HANDSHAKE_VERSION:
        raise ValueError("of another version")
    return Unpacker(body)


def field(data: bytes) -> bytes:
    """At most 255 bytes, and before them how many there are."""
    return bytes((len(data),)) + data


def text_field(text: str) -> bytes:
    """A line as a field, cut if it is too long."""
    data = text.encode()[:MAX_FIELD_BYTES].decode(errors="ignore").encode()
    return field(data)


def number(value: int, n_bytes: int) -> bytes:
    """A number, little endian."""
    return value.to_bytes(n_bytes, "little")


class Unpacker:
    """Takes fields off the front of what was received."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, n_bytes: int) -> bytes:
        """The next bytes, all of them."""
        at, self._at = self._at, self._at + n_bytes
        if self._at > len(self._data):
            raise ValueError("too short")
        return self._data[at : self._at]

    def number(self, n_bytes: int, low: int, high: int) -> int:
        """A number in these bounds."""
        value = int.from_bytes(self.take(n_bytes), "little")
        if not low <= value <= high:
            raise ValueError(value)
        return value

    def field(self) -> bytes:
        """What `field` has written."""
        return self.take(self.take(1)[0])

    def text(self) -> str:
        """What `text_field` has written: one line, since it ends up in logs and messages."""
        text = self.field().decode()
        if not text.isprintable():
            raise ValueError(text)
        return text

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        """Make sure that nothing is left."""
        if not self.is_at_end:
            raise ValueError("too long")
