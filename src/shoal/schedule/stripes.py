"""Stripes: the parts of a buffer that each have their own order of folds and their own reducer.

The place of a stripe and its order depend on the length of the buffer and on the number of workers,
NOT on the reducers: the bits of sums follow from them (docs/decisions/0012).
"""

from __future__ import annotations

from typing import Final

# NOT to be tuned: the bits of sums depend on it. Between hosts a shorter message costs more than
# its bytes (docs/decisions/0007); with longer stripes fewer ranks reduce.
STRIPE_FLOOR_BYTES: Final = 16 << 10

LINE_BYTES: Final = 64
"""Bytes of a cache line. Chunks begin on one, so that no two ranks write to the same line."""


def n_stripes_of(n_bytes: int, n_workers: int) -> int:
    """Return the number of stripes: one for each worker, or as many as the floor allows."""
    return max(1, min(n_workers, n_bytes // STRIPE_FLOOR_BYTES))


def stride_of(n_bytes: int, n_stripes: int, unit: int = LINE_BYTES) -> int:
    """Return the bytes of every stripe but the last ones: a multiple of `unit`."""
    return -(-n_bytes // (unit * n_stripes)) * unit


def first_of(stripe: int, n_workers: int, n_stripes: int) -> int:
    """Return the first worker in the order of a stripe."""
    return stripe * n_workers // n_stripes
