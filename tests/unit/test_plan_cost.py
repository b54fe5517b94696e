"""Costs of counts: each possible bottleneck alone, and calls in a row."""

from dataclasses import replace

import pytest

from shoal.codec import Codec
from shoal.plan.choose import choose
from shoal.plan.cluster import Cluster, LinkCost
from shoal.plan.cost import cost_of
from shoal.plan.defaults import wire_of

FREE = LinkCost(0.0, 0.0, 0.0)


def nothing_costs(hosts: tuple[int, ...]) -> Cluster:
    return Cluster(hosts, FREE, FREE, 0.0, n_cores=1)


def test_memory_costs_passes_and_unkept_scratch() -> None:
    cluster = replace(nothing_costs((0, 1)), fresh_us_per_byte=1.0)
    works = [cost_of("all_reduce", "direct", n << 20, cluster).work_us for n in (25, 32, 33)]
    assert works == [0, 0, 33 << 20]
    cluster = replace(nothing_costs((0, 1)), memory_us_per_byte=1.0)
    for name, passes in (("sharded", 2), ("ring", 2), ("direct", 4)):
        assert cost_of("all_reduce", name, 1 << 20, cluster).rank == passes << 20


def test_bytes_between_hosts_keep_a_core_of_each_end_busy() -> None:
    cluster = replace(nothing_costs((0, 0, 1, 1)), network_us_per_byte=1.0)
    assert cost_of("broadcast", "chain", 1000, cluster).rank == 1000
    assert cost_of("all_reduce", "doubling", 1000, cluster).rank == 2000
    cluster = replace(nothing_costs((0, 1)), network_us_per_byte=1.0)
    wide, narrow = (
        choose("all_reduce", 1 << 20, cluster, "sharded", codec=codec).cost_us
        for codec in (Codec.IDENTITY, Codec.BF16)
    )
    assert narrow == wide / 2


def test_a_chain_costs_only_its_bottleneck_where_calls_follow_one_another() -> None:
    cluster = replace(nothing_costs(tuple(range(8))), wire=LinkCost(0.0, 1.0, 0.0))
    costs = {name: cost_of("broadcast", name, 1000, cluster) for name in ("chain", "direct")}
    assert {name: cost.busy_us for name, cost in costs.items()} == {"chain": 1000, "direct": 7000}
    assert all(cost.alone_us == 7000 for cost in costs.values())
    assert costs["chain"].cost_us == 4000
    everyone = cost_of("all_reduce", "ring", 1000, cluster)
    assert everyone.cost_us == everyone.alone_us


def test_exchanges_with_several_hosts_slow_nics() -> None:
    cluster = replace(nothing_costs((0, 1, 2, 3)), wire=wire_of(1000), contention=0.5)
    parts = {
        "gather direct": 0,
        "broadcast direct": 0,
        "all_reduce ring": 0,
        "all_reduce doubling": 0.5,
        "all_gather bruck": 0.5,
        "all_reduce sharded": 1,
        "all_to_all pairwise": 1,
    }
    for algorithm, part in parts.items():
        cost = cost_of(*algorithm.split(), 256 << 10, cluster)
        assert cost.contention == pytest.approx(part * 0.5 * cost.network)
    # The loss ends after the first mebibyte of a message.
    costs = [cost_of("all_to_all", "pairwise", n << 20, cluster) for n in (1, 2, 4)]
    assert len({cost.contention for cost in costs}) == 1
    assert costs[1].network == 2 * costs[0].network
