"""The best that the network allows a collective: the line in tables and reports."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shoal.bench.collectives import COLLECTIVES
from shoal.lab import measure_streams, ring_of

if TYPE_CHECKING:
    from shoal.bench.sweep import BenchPlace
    from shoal.lab import Lab

# Half a second of 1 Gbit/s: long against the 1 ms in which the burst of an idle NIC passes.
STREAM_BYTES: Final = 60_000_000
# Half a second of what two cores move, at 1 GB/s.
UNSHAPED_STREAM_BYTES: Final = 500_000_000


@dataclass
class Limit:
    """The rate of raw TCP streams over the NICs of a lab.

    Of the slowest stream while all hosts send in a ring, before the first call and after the last.
    """

    place: BenchPlace
    raw_bytes_per_s: list[float] = field(default_factory=list)

    def measure(self, lab: Lab) -> None:
        """Let raw streams run once more."""
        n_bytes = STREAM_BYTES if self.place.rate_mbit else UNSHAPED_STREAM_BYTES
        self.raw_bytes_per_s.append(min(measure_streams(lab, ring_of(self.place.n_hosts), n_bytes)))

    def time_s(self, collective: str, n_bytes: int) -> float | None:
        """Return the least time of a call at the rate of the raw streams; None if it is unknown.

        Whatever the algorithm, some bytes must cross a host's NIC. For collectives that are the
        same on all hosts, a host counts as a rank of `bus`.
        """
        n_crossing = crossing_bytes(collective, n_bytes, self.place)
        if not self.raw_bytes_per_s or n_crossing is None:
            return None
        return n_crossing / statistics.fmean(self.raw_bytes_per_s)


def crossing_bytes(collective: str, n_bytes: int, place: BenchPlace) -> float | None:
    """Return the bytes that some host must send or get at least; None if hosts need not talk."""
    row, n_on_host = COLLECTIVES[collective], place.n_ranks // max(place.n_hosts, 1)
    if place.n_hosts < 2 or n_bytes == 0 or (row.in_pairs and n_on_host > 1):
        return None
    return row.bus(place.n_hosts) * n_bytes * (n_on_host if row.each else 1)
