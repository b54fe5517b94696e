"""Rendezvous records that a test changes before they reach the store."""

from typing import Any

from shoal.rendezvous.record import Record, decode


def record_of(value: bytes) -> Record:
    """Return the record that a value of the store holds."""
    record = decode(value)
    assert record is not None
    return record


def rewritten(value: bytes, **changes: Any) -> bytes:
    """Return the record with some of its fields replaced."""
    return record_of(value)._replace(**changes).encode()
