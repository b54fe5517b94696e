"""Records of ranks, changed by a test as if the rank had published something else."""

from typing import Any

from shoal.rendezvous.record import Record, decode


def record_of(value: bytes) -> Record:
    """What this value of the store says."""
    record = decode(value)
    assert record is not None
    return record


def rewritten(value: bytes, **changes: Any) -> bytes:
    """This record with other values in some of its fields."""
    return record_of(value)._replace(**changes).encode()
