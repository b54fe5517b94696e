"""The proof that opens every connection: both of its ends, without any I/O.

The native core has the protocol (`native/transport/handshake.h`), because it speaks it too. An end
reads exactly `wants` bytes, hands them to `feed`, and sends what that returns, until `progress` is
no longer WAITING.
"""

from typing import Final

from shoal.engine import (
    HANDSHAKE_MAGIC,
    HANDSHAKE_VERSION,
    N_NONCE_BYTES,
    ClientHandshake,
    Hello,
    Progress,
    ServerHandshake,
)

__all__ = [
    "ClientHandshake",
    "ServerHandshake",
    "Hello",
    "Progress",
    "MAGIC",
    "VERSION",
    "N_NONCE_BYTES",
]

MAGIC: Final = HANDSHAKE_MAGIC
VERSION: Final = HANDSHAKE_VERSION
