"""The messages between the client and the server of a store, over a peer of an `Endpoint`.

    SET  length of the key (2 bytes), the key, the value     -> VALUE, empty, or FULL
    GET  milliseconds to wait (4 bytes), the key             -> VALUE, or MISSING

Before that the client proves the job key. In a job without a key it proves a public constant, which
only keeps other protocols out.
"""

from __future__ import annotations

from typing import Final

from shoal.engine import Hello
from shoal.rendezvous.key import pair_key

SET, GET, VALUE, MISSING, FULL = range(8, 13)
N_LENGTH: Final = 2
N_WAIT: Final = 4
STORE_HELLO: Final = Hello(epoch=0, rank=0, to_rank=0)  # a store has no epoch and no rank
_NO_KEY: Final = b"shoal: a job without a key"


def store_key(job_key: bytes | None) -> bytes:
    """Return the key that a client proves to a store."""
    return pair_key(job_key or _NO_KEY, 0, 0, 0, "store")
