"""What a store's client and server say to each other.

A connection starts with the handshake of every other connection of shoal, under the job key (or,
in a job without one, under a public constant, which at least keeps other protocols out). Then
come requests, one at a time, each with its reply:

    request  op, key length, value length, timeout in ms; key; value
    reply    status, value length; value

Every length is checked against a fixed bound before anything is read or allocated for it.
"""

from __future__ import annotations

import struct
from typing import Final

from shoal.engine import Hello
from shoal.rendezvous.key import pair_key

SET, GET, TRY_GET = 1, 2, 3
OK, MISSING, FULL = 0, 1, 2
REQUEST: Final = struct.Struct("<BxHII")
REPLY: Final = struct.Struct("<BxxxI")
STORE_HELLO: Final = Hello(epoch=0, rank=0, to_rank=0)  # a store belongs to no epoch and no rank
_NO_KEY: Final = b"shoal: a job without a key"


def store_key(job_key: bytes | None) -> bytes:
    """What a client proves to a store."""
    return pair_key(job_key or _NO_KEY, 0, 0, 0, "store")
