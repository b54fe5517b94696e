"""A cluster: its hosts, and the costs of messages inside and between them.

The planner and the simulator read the same description.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal.errors import UsageError

SCRATCH_KEPT_BYTES: Final = 32 << 20
"""More scratch is new memory in every call: glibc returns larger blocks to the kernel when they are
freed (the largest M_MMAP_THRESHOLD, mallopt(3)), and keeps smaller ones."""

CONTENDED_BYTES: Final = 1 << 20
"""The bytes of each message that `Cluster.contention` slows down: `sharded` took 1.2 to 1.5 times
the time of its bytes with messages of 64 KiB to 1 MiB, 1.1 with 3 MiB, 1.0 to 1.1 with 6 MiB
(docs/simulation.md)."""


@dataclass(frozen=True)
class LinkCost:
    """The cost of a message between two ranks.

    On a free link a message of b bytes arrives after `latency_us + b * us_per_byte`. It keeps a
    core at each end busy for `message_us`, and the link for `b * us_per_byte`.
    """

    latency_us: float
    us_per_byte: float
    message_us: float

    def __post_init__(self) -> None:
        if min(self.latency_us, self.us_per_byte, self.message_us) < 0:
            raise UsageError(f"{self}: costs must be >= 0")


class Nic(NamedTuple):
    """The rates of a NIC, out and in at the same time, in bytes per microsecond (MB/s)."""

    out: float
    into: float

    @classmethod
    def of(cls, link: LinkCost) -> Nic:
        """Return the NIC of a link with the same rate both ways."""
        return cls(1 / link.us_per_byte, 1 / link.us_per_byte)

    @property
    def slower(self) -> float:
        """The rate of the slower direction."""
        return min(self)


@dataclass(frozen=True)
class Nics:
    """The NICs of the servers that may reduce for a cluster's workers, and of the workers.

    Args:
        workers: empty if all are `Cluster.wire`.
    """

    servers: tuple[Nic, ...]
    workers: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        nics = (*self.servers, *self.workers)
        wrong = [nic for nic in nics if not (0 < nic.out < math.inf and 0 < nic.into < math.inf)]
        if wrong:
            raise UsageError(f"{wrong[0]}: a NIC carries more than 0 MB/s each way")


@dataclass(frozen=True)
class Cluster:
    """Hosts, the ranks on them, and the costs of their links.

    Args:
        hosts: the host of every rank, numbered from 0 in order of first appearance.
        local: the link between two ranks of a host: shared memory, a path for each rank.
        wire: the link between two hosts. The ranks of a host share one full-duplex NIC, whose whole
            rate is in `us_per_byte`.
        memory_us_per_byte: the time of a core to fold or copy a byte.
        n_cores: the cores of each host, which its ranks share.
        burst_bytes: the bytes that an idle NIC passes at once, each way: the bucket of a shaped
            link, as in clouds and `tc tbf`.
        fresh_us_per_byte: the time of the kernel to find and clear a byte of new memory, for
            scratch of more than `SCRATCH_KEPT_BYTES`.
        network_us_per_byte: the time of a core to send or receive a byte through the kernel's
            network stack, besides the pass over memory.
        contention: the part by which the first `CONTENDED_BYTES` of a message take longer if its
            sender sends to several hosts at a time and its receiver receives from several.
    """

    hosts: tuple[int, ...]
    local: LinkCost
    wire: LinkCost
    memory_us_per_byte: float
    n_cores: int
    burst_bytes: int = 0
    fresh_us_per_byte: float = 0.0
    network_us_per_byte: float = 0.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        first_seen = list(dict.fromkeys(self.hosts))
        if not self.hosts or first_seen != list(range(len(first_seen))):
            raise UsageError(
                f"hosts {self.hosts[:8]}... must be numbered from 0 in order of first appearance"
            )
        memory = self.memory_us_per_byte, self.fresh_us_per_byte, self.network_us_per_byte
        if min(*memory, self.burst_bytes, self.contention) < 0 or self.n_cores < 1:
            raise UsageError(
                f"{memory[0]} us per byte of memory, {memory[1]} where it is new, {memory[2]} for "
                f"the network, a burst of {self.burst_bytes} B, contention {self.contention} and "
                f"{self.n_cores} cores: costs must be >= 0, and cores >= 1"
            )

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def n_hosts(self) -> int:
        return max(self.hosts) + 1


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Number hosts by their names, from 0 in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
