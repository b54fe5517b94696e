"""Claims of papers about their algorithms, simulated: a function for each.

docs/simulation.md shows them, tests compare them with the papers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from shoal.analysis.simulate.simulator import Simulation, simulate, simulate_steps
from shoal.limits import SEGMENT_BYTES
from shoal.plan import default_cluster
from shoal.plan.cluster import Cluster, LinkCost, Nic, Nics
from shoal.plan.shares import best_shares
from shoal.schedule import Recv, Send, Step

_NOTHING: Final = LinkCost(0.0, 0.0, 0.0)
_ONE_GBIT: Final = LinkCost(latency_us=30.0, us_per_byte=0.008, message_us=5.0)


# Segments of this length leave chunks whole, which saves time if only bytes matter.
_WHOLE: Final = 1 << 30


def machines(n_hosts: int, ranks_per_host: int = 1, wire: LinkCost = _ONE_GBIT) -> Cluster:
    """Return hosts with equally many ranks, where only the wire costs time."""
    hosts = tuple(rank // ranks_per_host for rank in range(n_hosts * ranks_per_host))
    return Cluster(hosts, _NOTHING, wire, 0.0, n_cores=ranks_per_host)


# ---- Kolodziej, "Allreduce" (2019), final thoughts: 14 steps against 6 on a DGX-1 of 8 GPUs


@functools.cache
def tutorial_steps(n_devices: int = 8) -> tuple[int, int]:
    """Return the consecutive steps of a ring and of a tree."""
    played = (simulate("all_reduce", name, machines(n_devices), 4) for name in ("ring", "tree"))
    ring, tree = (one.rounds for one in played)
    return ring, tree


# ---- Thangakrishnan et al., "Herring" (SC 2020), section IV-A: 196.8 MB for 100 MB over 64 nodes


@functools.cache
def sent_by_a_node(algorithm: str, n_nodes: int = 64, n_bytes: int = 100_000_000) -> int:
    """Return the bytes that a node sends in an all-reduce of `n_bytes`."""
    cluster = machines(n_nodes)
    return simulate("all_reduce", algorithm, cluster, n_bytes, segment=_WHOLE).sent(0)


@functools.cache
def sent_to_servers(n_nodes: int = 64, n_bytes: int = 100_000_000) -> int:
    """Return the bytes that a node sends with as many servers as nodes."""
    return _herring(n_nodes, n_bytes).sent(0)


# ---- the same, table III: what a server sends and receives, in units of 1024 KB

HERRING_KB: Final = 86_684
"""The gradients of table II in one balanced fusion buffer."""
VARIABLE_0_KB: Final = 61_056
"""The largest gradient."""


class ServerLoad(NamedTuple):
    """The bytes that a server receives and sends in one iteration."""

    received: int
    sent: int


@functools.cache
def herring_server(n_nodes: int) -> ServerLoad:
    """Return the load of one of `n_nodes` servers that share a balanced fusion buffer."""
    return _load_of(n_nodes, _herring(n_nodes, HERRING_KB * 1024))


@functools.cache
def traditional_server(n_nodes: int) -> ServerLoad:
    """Return the load of the server that holds all of variable 0."""
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


def _herring(
    n_nodes: int, n_bytes: int, wire: LinkCost = _ONE_GBIT, segment: int = _WHOLE
) -> Simulation:
    """Simulate as many servers as nodes, which reduce everything."""
    name = f"sharded[{n_nodes}*0|{n_nodes}*1]"
    return simulate("all_reduce", name, machines(2 * n_nodes, wire=wire), n_bytes, segment=segment)


def _load_of(server: int, played: Simulation) -> ServerLoad:
    nic = played.nics[server]
    return ServerLoad(nic.received, nic.sent)


# ---- the same, section IV: nodes of 8 GPUs and 100 Gbit/s that train BERT-large

HEADLINE_NODES: Final = (8, 256, 2048)
# Elastic Fabric Adapter: the kernel is out of the way, so that a message costs a core nothing.
_EFA: Final = LinkCost(latency_us=15.0, us_per_byte=1 / 12.5e3, message_us=0.0)
_BERT_BYTES: Final = 680_000_000
"""The gradients in 16 bits: table I sums all of them in one call of 680 MB."""
_STEP_US: Final = 8 * 64 / 1143 * 1e6
"""The step of a single node: 8 GPUs with 64 sequences each, 1143 sequences a second."""


@functools.cache
def bert_us(n_nodes: int, *, by_servers: bool, n_bytes: int = _BERT_BYTES) -> float:
    """Return the time to sum all gradients by a ring, or by as many servers as nodes."""
    if by_servers:
        return _herring(n_nodes, n_bytes, _EFA, SEGMENT_BYTES).time_us
    return simulate("all_reduce", "ring", machines(n_nodes, wire=_EFA), n_bytes).time_us


def efficiency(n_nodes: int, *, by_servers: bool) -> float:
    """Return the part of its single throughput that a node keeps without overlap."""
    return _STEP_US / (_STEP_US + bert_us(n_nodes, by_servers=by_servers))


# ---- Jiang et al. (BytePS), OSDI 2020, 4.1: shares that keep all NICs busy

SHARED: Final = ((8, 1), (8, 2), (8, 4), (8, 8), (8, 12), (16, 16))


class SharedTime(NamedTuple):
    """Times as multiples of a tensor's time on one NIC: the linear program's, and simulated."""

    best: float
    simulated: float
    alone: float


def shared_time(n_workers: int, n_servers: int, n_bytes: int) -> SharedTime:
    """Simulate 1 Gbit/s."""
    cluster = default_cluster(range(n_workers), wire=_ONE_GBIT)
    pool = Nics((Nic.of(_ONE_GBIT),) * n_servers)
    shares = best_shares([Nic.of(_ONE_GBIT)] * n_workers, pool.servers)
    weights = shares.weights()
    both = replace(cluster, hosts=tuple(range(n_workers + n_servers)))
    once = n_bytes * _ONE_GBIT.us_per_byte
    simulated = simulate("all_reduce", weights.name(), both, n_bytes).time_us / once
    alone = simulate("all_reduce", "ring", cluster, n_bytes).time_us / once
    return SharedTime(shares.us_per_byte / _ONE_GBIT.us_per_byte, simulated, alone)


# ---- Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4" (2019), figure 3

SUMMIT_GPUS: Final = (6, 24, 96, 384, 1536, 6144, 24_576)
_GPUS_PER_NODE: Final = 6
# The latencies that NCCL assumes for its low-latency protocol, in us, over NVLink and network:
# hwLat in src/graph/tuning.cc of NVIDIA/nccl.
_RING_US: Final = (0.47, 2.7)
_TREE_US: Final = (0.52, 5.0)


@functools.cache
def summit_latency_us(algorithm: str, n_gpus: int) -> float:
    """Return the time of a few bytes on nodes of six GPUs, by ring, ring_2d or tree."""
    local_us, wire_us = _TREE_US if algorithm == "tree" else _RING_US
    nodes = machines(n_gpus // _GPUS_PER_NODE, _GPUS_PER_NODE, LinkCost(wire_us, 0.0, 0.0))
    nodes = replace(nodes, local=LinkCost(local_us, 0.0, 0.0))
    return simulate("all_reduce", algorithm, nodes, 4).time_us


# ---- Fairring's README (2021), microbenchmarks: 64 buckets, 1 to 32 machines of 8 GPUs

FAIRRING_MACHINES: Final = (1, 2, 4, 8, 16, 32)
_GPUS_PER_MACHINE: Final = 8
_BUCKETS_AT_A_TIME: Final = 8
BUCKET: Final = 25 << 20
# Four cards of 100 Gbit/s; NVLink of a V100, 150 GB/s each way, and its memory, 900 GB/s. NCCL (as
# above) assumes latencies of long messages of 3.4 us in a machine and 9.6 us between two.
_FABRIC: Final = LinkCost(latency_us=9.6, us_per_byte=1 / 50e3, message_us=0.0)
_NVLINK: Final = LinkCost(latency_us=3.4, us_per_byte=1 / 150e3, message_us=0.0)
_MEMORY_US_PER_BYTE: Final = 1 / 900e3
FAIRRING_MESSAGE_US: Final = 25.0
"""The time of a rank for a message at each end; not published, see docs/simulation.md."""


@functools.cache
def fairring_rate(n_machines: int, bucket: int, message_us: float = FAIRRING_MESSAGE_US) -> float:
    """Return the bytes per microsecond of buckets that several calls average at a time."""
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
    """Return the bytes per microsecond of buckets that rings average in turn, as in NCCL."""
    return bucket / simulate("all_reduce", "ring", _gpus(n_machines, _FABRIC), bucket).time_us


def _gpus(n_machines: int, fabric: LinkCost) -> Cluster:
    gpus = machines(n_machines, _GPUS_PER_MACHINE, fabric)
    return replace(gpus, local=_NVLINK, memory_us_per_byte=_MEMORY_US_PER_BYTE)


def scaled_buckets(machines: Sequence[int] = (8, 16, 32)) -> dict[int, int]:
    """Return buckets that grow with the machines: 25 MiB for 8, 50 for 16, 100 for 32."""
    return {n: BUCKET * n // 8 for n in machines}
