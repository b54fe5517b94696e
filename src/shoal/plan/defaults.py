"""The costs that the planner assumes if no setting or measurement gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.plan.cluster import Cluster, LinkCost

if TYPE_CHECKING:
    from shoal.codec import Codec

# Measured on 2 cores of an AMD EPYC by `shoal tune` (bench/LOG.md). Inside a host only ratios
# decide: a message against the bytes that could be folded meanwhile.
LOCAL: Final = LinkCost(latency_us=1.0, us_per_byte=0.0, message_us=0.6)
MEMORY_US_PER_BYTE: Final = 1 / 18e3
# A page fault for each 4 KiB, and clearing it; measured by all-reduces between two hosts with more
# scratch than glibc keeps (bench/LOG.md, 2026-11-21).
FRESH_US_PER_BYTE: Final = 1 / 2e3

# TCP takes 0.24 ns of a core for a byte at each end, with a pass over memory that is counted apart
# (all-reduces of 128 MiB between two unshaped hosts: bench/LOG.md, 2026-11-21).
NETWORK_US_PER_BYTE: Final = 1 / 5.5e3

# Under BBR, on 4 and 8 hosts at 200 Mbit/s and 1 Gbit/s, the simulator is within 15 % at 105 of 120
# points with 0.25, at 104 with 0.2 or 0.3, 99 with 0.1 and 88 with 0 (docs/decisions/0023).
CONTENTION: Final = 0.25

# Ethernet and TCP: a system call and a wake-up at each end.
LATENCY_US: Final = 30.0
MESSAGE_US: Final = 5.0

DEFAULT_N_CORES: Final = 2

# A core's time to encode a byte of float32, or to decode and fold it: half of what rounding takes,
# which is both, with AVX-512: 4.5 GB/s in mxfp8 and mxfp4, 2.2 for the largest values of chunks
# (bench/LOG.md, 2026-11-27). Codecs without blocks are as fast as memory.
_BLOCKS_US_PER_BYTE: Final = 1 / 9e3
_LARGEST_US_PER_BYTE: Final = 1 / 4.4e3


def encoding_us_per_byte(codec: Codec) -> float:
    """Return a core's time to encode a byte of float32, or to decode and fold it."""
    if codec.keep:
        return _LARGEST_US_PER_BYTE
    return _BLOCKS_US_PER_BYTE if codec.block > 1 else 0.0


def wire_of(
    mbit: float, latency_us: float = LATENCY_US, message_us: float = MESSAGE_US
) -> LinkCost:
    """Return the link between hosts of a rate in Mbit/s."""
    return LinkCost(latency_us, 8 / mbit, message_us)


DEFAULT_MBIT: Final = 10_000
WIRE: Final = wire_of(DEFAULT_MBIT)
"""The link between hosts whose interfaces report no rate."""


def default_cluster(
    hosts: Sequence[int], *, n_cores: int = DEFAULT_N_CORES, wire: LinkCost = WIRE
) -> Cluster:
    """Return a cluster of these hosts with the default costs of memory."""
    return Cluster(
        tuple(hosts),
        *(LOCAL, wire, MEMORY_US_PER_BYTE, n_cores),
        fresh_us_per_byte=FRESH_US_PER_BYTE,
        network_us_per_byte=NETWORK_US_PER_BYTE,
        contention=CONTENTION,
    )
