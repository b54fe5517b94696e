"""What papers say of their algorithms, simulated: each function is one claim, worked out anew.

docs/simulation.md shows them, tests compare them with the papers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from shoal.analysis.simulate.simulator import Simulation, simulate, simulate_steps
from shoal.plan.cluster import Cluster, LinkCost
from shoal.schedule import Finish, Place, Recv, Send, Step

_NOTHING: Final = LinkCost(0.0, 0.0, 0.0)
_ONE_GBIT: Final = LinkCost(latency_us=30.0, us_per_byte=0.008, message_us=5.0)


# Where only bytes are asked for: nothing is cut, which is what takes a simulation its time.
_WHOLE: Final = 1 << 30


def machines(n_hosts: int, ranks_per_host: int = 1, wire: LinkCost = _ONE_GBIT) -> Cluster:
    """Hosts of equal numbers of ranks; nothing but the wire costs anything."""
    hosts = tuple(rank // ranks_per_host for rank in range(n_hosts * ranks_per_host))
    return Cluster(hosts, _NOTHING, wire, 0.0, n_cores=ranks_per_host)


# ---- Kolodziej, "Allreduce" (2019), final thoughts: 14 steps against 6 on a DGX-1 of 8 GPUs


@functools.cache
def tutorial_steps(n_devices: int = 8) -> tuple[int, int]:
    """How many steps, one after the other, a ring and a tree take."""
    played = (simulate("all_reduce", name, machines(n_devices), 4) for name in ("ring", "tree"))
    ring, tree = (one.rounds for one in played)
    return ring, tree


# ---- Thangakrishnan et al., "Herring" (SC 2020), section IV-A: 196.8 MB for 100 MB over 64 nodes


@functools.cache
def sent_by_a_node(algorithm: str, n_nodes: int = 64, n_bytes: int = 100_000_000) -> int:
    """The bytes that a node sends so that all have the sum of `n_bytes`."""
    cluster = machines(n_nodes)
    return simulate("all_reduce", algorithm, cluster, n_bytes, segment=_WHOLE).sent(0)


@functools.cache
def sent_to_servers(n_nodes: int = 64, n_bytes: int = 100_000_000) -> int:
    """The bytes that a node sends if as many servers as nodes sum them up."""
    return _herring(n_nodes, n_bytes).sent(0)


# ---- the same, table III: what a server sends and receives, in units of 1024 KB

HERRING_KB: Final = 86_684
"""The gradients of table II in one balanced fusion buffer."""
VARIABLE_0_KB: Final = 61_056
"""The largest of them."""


class ServerLoad(NamedTuple):
    """What a server receives and what it sends in one iteration, in bytes."""

    received: int
    sent: int


@functools.cache
def herring_server(n_nodes: int) -> ServerLoad:
    """A server of `n_nodes` that share a balanced fusion buffer."""
    return _load_of(n_nodes, _herring(n_nodes, HERRING_KB * 1024))


@functools.cache
def traditional_server(n_nodes: int) -> ServerLoad:
    """The server that holds variable 0 as a whole."""
    workers: list[list[Step]] = [[Send(n_nodes, 0), Recv(n_nodes, 0)] for _ in range(n_nodes)]
    server: list[Step] = [Recv(worker, 0, fold=worker > 0) for worker in range(n_nodes)]
    server += [Send(worker, 0) for worker in range(n_nodes)]
    played = simulate_steps(
        [*workers, server],
        machines(n_nodes + 1),
        lambda _rank, _place: VARIABLE_0_KB * 1024,
        segment=_WHOLE,
    )
    return _load_of(n_nodes, played)


def _herring(n_nodes: int, n_bytes: int) -> Simulation:
    """Ranks 0 to n-1 are workers, the others servers: ranks without a tensor of their own."""
    workers = [list(_worker(rank, n_nodes)) for rank in range(n_nodes)]
    servers = [list(_server(shard, n_nodes)) for shard in range(n_nodes)]
    shard_bytes = n_bytes // n_nodes

    def length(_rank: int, _place: Place) -> int:
        return shard_bytes

    return simulate_steps([*workers, *servers], machines(2 * n_nodes), length, segment=_WHOLE)


def _worker(rank: int, n_nodes: int) -> Iterator[Step]:
    shards = [(rank + k) % n_nodes for k in range(n_nodes)]
    yield from (Send(n_nodes + shard, shard) for shard in shards)
    yield from (Recv(n_nodes + shard, shard) for shard in shards)


def _server(shard: int, n_nodes: int) -> Iterator[Step]:
    workers = [(shard - k) % n_nodes for k in range(n_nodes)]
    for k, worker in enumerate(workers):
        yield Recv(worker, 0, fold=k > 0)
    yield Finish(0)
    yield from (Send(worker, 0) for worker in workers)


def _load_of(server: int, played: Simulation) -> ServerLoad:
    nic = played.nics[server]
    return ServerLoad(nic.received, nic.sent)


# ---- Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4" (2019), figure 3

SUMMIT_GPUS: Final = (6, 24, 96, 384, 1536, 6144, 24_576)
_GPUS_PER_NODE: Final = 6
# What NCCL itself expects of its low-latency protocol, us: src/graph/tuning.cc of NVIDIA/nccl,
# hwLat, NVLink and network.
_RING_US: Final = (0.47, 2.7)
_TREE_US: Final = (0.52, 5.0)


@functools.cache
def summit_latency_us(algorithm: str, n_gpus: int) -> float:
    """The time of a few bytes on nodes of six GPUs, by ring, ring_2d or tree."""
    local_us, wire_us = _TREE_US if algorithm == "tree" else _RING_US
    nodes = machines(n_gpus // _GPUS_PER_NODE, _GPUS_PER_NODE, LinkCost(wire_us, 0.0, 0.0))
    nodes = replace(nodes, local=LinkCost(local_us, 0.0, 0.0))
    return simulate("all_reduce", algorithm, nodes, 4).time_us


# ---- Fairring's README (2021), microbenchmarks: 64 buckets, 1 to 32 machines of 8 GPUs

FAIRRING_MACHINES: Final = (1, 2, 4, 8, 16, 32)
_GPUS_PER_MACHINE: Final = 8
_BUCKETS_AT_A_TIME: Final = 8
BUCKET: Final = 25 << 20
# Four cards of 100 Gbit/s; NVLink of a V100, 150 GB/s each way, and its memory, 900 GB/s. Latencies
# are what NCCL expects of long messages (as above): 3.4 us in a machine, 9.6 us between two.
_FABRIC: Final = LinkCost(latency_us=9.6, us_per_byte=1 / 50e3, message_us=0.0)
_NVLINK: Final = LinkCost(latency_us=3.4, us_per_byte=1 / 150e3, message_us=0.0)
_MEMORY_US_PER_BYTE: Final = 1 / 900e3
FAIRRING_MESSAGE_US: Final = 25.0
"""What a message costs a rank at each end. No source tells: see docs/simulation.md."""


@functools.cache
def fairring_rate(n_machines: int, bucket: int, message_us: float = FAIRRING_MESSAGE_US) -> float:
    """Bytes per microsecond of buckets that several calls average at a time."""
    fabric = replace(_FABRIC, message_us=message_us)
    played = simulate(
        "all_reduce",
        "fairring",
        _gpus(n_machines, fabric),
        bucket,
        n_calls=_BUCKETS_AT_A_TIME,
        segment=bucket,  # it sends a shard in one piece
    )
    return _BUCKETS_AT_A_TIME * bucket / played.time_us


@functools.cache
def nccl_rate(n_machines: int, bucket: int) -> float:
    """Bytes per microsecond of buckets that rings average one after the other, as NCCL does."""
    return bucket / simulate("all_reduce", "ring", _gpus(n_machines, _FABRIC), bucket).time_us


def _gpus(n_machines: int, fabric: LinkCost) -> Cluster:
    gpus = machines(n_machines, _GPUS_PER_MACHINE, fabric)
    return replace(gpus, local=_NVLINK, memory_us_per_byte=_MEMORY_US_PER_BYTE)


def scaled_buckets(machines: Sequence[int] = (8, 16, 32)) -> dict[int, int]:
    """Buckets that grow with the number of machines: 25 MiB for 8, 50 for 16, 100 for 32."""
    return {n: BUCKET * n // 8 for n in machines}
