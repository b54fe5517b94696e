"""What a cluster costs: its hosts and what a message takes inside and between them.

One description, read by the planner and by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal.errors import UsageError

SCRATCH_KEPT_BYTES: Final = 32 << 20
"""Scratch of a call beyond this is new memory every time: glibc gives larger blocks back to the
kernel when they are freed (the largest M_MMAP_THRESHOLD, mallopt(3)), and keeps smaller ones."""

CONTENDED_BYTES: Final = 1 << 20
"""Of a message, what `Cluster.contention` slows down: `sharded` took 1.2 to 1.5 times the time of
its bytes in messages of 64 KiB to 1 MiB, 1.1 of 3 MiB, 1.0 to 1.1 of 6 MiB (docs/simulation.md)."""


@dataclass(frozen=True)
class LinkCost:
    """What one message between two ranks takes.

    A message of b bytes is there `latency_us + b * us_per_byte` after it started, if its link is
    free. It keeps a core of each end busy for `message_us`, and the link for `b * us_per_byte`.
    """

    latency_us: float
    us_per_byte: float
    message_us: float

    def __post_init__(self) -> None:
        if min(self.latency_us, self.us_per_byte, self.message_us) < 0:
            raise UsageError(f"{self}: costs must be >= 0")


class Nic(NamedTuple):
    """What a NIC carries each way at the same time, in bytes per microsecond: MB/s."""

    out: float
    into: float

    @classmethod
    def of(cls, link: LinkCost) -> Nic:
        """That of a link that is as fast both ways."""
        return cls(1 / link.us_per_byte, 1 / link.us_per_byte)

    @property
    def slower(self) -> float:
        """The rate of the way that carries less."""
        return min(self)


@dataclass(frozen=True)
class Nics:
    """Servers that may reduce for a cluster's workers, and how fast all their NICs are.

    Args:
        servers: the NIC of each.
        workers: the NIC of each worker where they differ; empty: all are `Cluster.wire`.
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
        hosts: the host of every rank, numbered from 0 in the order in which they first come up.
        local: between two ranks of one host: shared memory, of which each rank has its own path.
        wire: between two hosts. A host has one NIC, full duplex, that its ranks share: its
            `us_per_byte` is that of the whole NIC.
        memory_us_per_byte: of a fold or a copy by one core.
        n_cores: of each host, which its ranks share.
        burst_bytes: what a NIC that has rested lets pass at once, each way: the bucket of a
            shaped link, as clouds and `tc tbf` have them.
        fresh_us_per_byte: of memory that a core touches for the first time, which the kernel has to
            find and to clear: scratch of more than `SCRATCH_KEPT_BYTES`.
        network_us_per_byte: of a core, for what it sends to or receives from another host, besides
            the pass over memory: the kernel's network stack.
        contention: how much longer a NIC takes for the first `CONTENDED_BYTES` of a message where a
            host that sends to several at a time sends to one that receives from several.
        streams: connections of a worker to each server, for one to each worker: so many turns of
            its NIC. For the simulator: the engine has one, and its sends take turns (decision 27).
        nics: the NIC of each host where they differ; empty: all are as `wire` says.
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
    streams: int = 1
    nics: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        first_seen = list(dict.fromkeys(self.hosts))
        if not self.hosts or first_seen != list(range(len(first_seen))):
            raise UsageError(
                f"hosts {self.hosts[:8]}... must be numbered from 0 in the order in which they "
                "first come up"
            )
        memory = self.memory_us_per_byte, self.fresh_us_per_byte, self.network_us_per_byte
        if min(*memory, self.burst_bytes, self.contention) < 0 or self.n_cores < 1:
            raise UsageError(
                f"{memory[0]} us per byte of memory, {memory[1]} where it is new, {memory[2]} for "
                f"the network, a burst of {self.burst_bytes} B, contention {self.contention} and "
                f"{self.n_cores} cores: costs must be >= 0, and cores >= 1"
            )

        if self.nics and (len(self.nics) != self.n_hosts or min(n.slower for n in self.nics) <= 0):
            raise UsageError(f"{len(self.nics)} NICs for {self.n_hosts} hosts, each above 0 MB/s")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    @property
    def n_hosts(self) -> int:
        """How many hosts they are on."""
        return max(self.hosts) + 1

    def nic(self, host: int) -> Nic:
        """The NIC of a host."""
        return self.nics[host] if self.nics else Nic.of(self.wire)


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Hosts numbered from 0 in the order in which their names first come up."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
