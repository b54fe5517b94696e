"""Records of ranks, changed by a test as if the rank had published something else."""

from typing import Any

from shoal.rendezvous.record import seal, unseal


def rewritten(value: bytes, **changes: Any) -> bytes:
    """This record with other values in some of its fields."""
    fields = unseal(value)
    del fields["crc"]
    return seal(fields | changes)
