"""The use of servers in an all-reduce: the weights, and the sentence with the reason."""

import math
from dataclasses import replace

import pytest

from shoal.analysis.simulate.simulator import simulate
from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.plan import Nic, Nics, default_cluster
from shoal.plan.choose import choose
from shoal.plan.cluster import Cluster
from shoal.plan.cost import cost_of
from shoal.plan.defaults import wire_of
from shoal.plan.served import Served, choose_with_servers, cost_with_servers
from shoal.plan.shares import best_shares
from shoal.schedule.weights import Weights

MIB = 1 << 20


def flat(n: int, mbit: float = 1000) -> Cluster:
    return default_cluster(range(n), wire=wire_of(mbit))


def pool(k: int, mbit: float = 1000) -> Nics:
    return Nics((Nic(mbit / 8, mbit / 8),) * k)


def served(n: int, k: int, n_bytes: int = 100 * MIB) -> Served:
    return choose_with_servers(n_bytes, flat(n), pool(k))


def shared(n: int, k: int) -> Weights:
    """Return the best weights, even if servers are not worth it."""
    return best_shares([Nic(125, 125)] * n, pool(k).servers).weights()


def test_as_many_servers_as_workers_nearly_halve_the_time() -> None:
    found = served(16, 16)
    assert found.names == ("sharded[16*0|16*1].servers",)
    assert found.alone_us == cost_of("all_reduce", "sharded", 100 * MIB, flat(16)).cost_us
    assert 1.6 < found.alone_us / found.cost_us < 1.9
    assert found.bottleneck == "the NICs of workers and servers"


def test_fewer_servers_share_the_work_with_workers() -> None:
    found = served(8, 4)
    assert found.names == ("sharded[8*56|4*149].servers", "sharded[8*56|4*149].workers")
    # 2n(n-1) / (n^2 + kn - 2k) of the tensor, plus the loss where connections compete.
    assert 1.05 < found.cost_us / (112 / 88 * 100 * MIB * 8 / 1000) < 1.12
    assert found.why.startswith("100 MiB over 8 workers and 4 servers take 1.18 s where sharded")


def test_predicted_gains_are_near_to_times_measured_with_8_workers() -> None:
    for k, took_ms in ((0, 988), (1, 926), (2, 875), (4, 749), (6, 735), (7, 700), (8, 572)):
        # 25 MiB at 400 Mbit/s in the lab, where a message takes 10 us and a core of each end 16.
        cluster = default_cluster(range(8), wire=wire_of(0.956 * 400, 10, 16))
        found = choose_with_servers(25 * MIB, cluster, pool(k or 1, 0.956 * 400))
        cost_us = found.cost_us if k else found.alone_us
        assert cost_us / 1e3 == pytest.approx(took_ms, rel=0.1)
        assert found.weights is not None


def test_workers_alone_are_priced_by_the_algorithm_they_would_use() -> None:
    """All calls of a job with servers are sharded, for equal bits, though a ring is faster."""
    assert choose("all_reduce", 100 * MIB, flat(19)).name == "ring"
    found = served(19, 1)
    assert found.weights is None
    assert found.cost_us == found.alone_us
    assert found.cost_us == cost_of("all_reduce", "sharded", 100 * MIB, flat(19)).cost_us
    assert served(19, 0).cost_us < found.cost_us
    assert "since 100 MiB over 19 workers and 1 server would take 1.64 s where" in found.why


def test_servers_do_all_where_small_shares_of_workers_would_cost_more() -> None:
    for k in range(1, 8):
        found = served(8, k, 25 * MIB).weights
        assert found is None or any(found.workers)
    last = choose_with_servers(25 * MIB, flat(8), Nics((*pool(7).servers, Nic(100, 100))))
    assert last.weights == Weights((0,) * 8, (5,) * 7 + (4,))
    assert last.bottleneck == "the NICs of servers"
    slow = Nics((*pool(7).servers, Nic(62.5, 62.5), Nic(62.5, 62.5)))
    uneven = choose_with_servers(25 * MIB, flat(8), slow).weights
    assert uneven == Weights((0,) * 8, (2,) * 7 + (1,) * 2)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 12])
def test_costs_are_within_a_quarter_of_the_simulation(k: int) -> None:
    weights = shared(8, k)
    played = simulate("all_reduce", weights.name(), replace(flat(8 + k), contention=0.0), 100 * MIB)
    planned = cost_with_servers(weights, 100 * MIB, flat(8), pool(k)).cost_us
    assert played.time_us == pytest.approx(planned, rel=0.25)


def test_small_calls_are_left_to_the_workers() -> None:
    found = served(8, 4, 64 << 10)
    assert found.weights is None
    assert found.names == ()
    assert found.cost_us == found.alone_us
    assert "wait for latency, which they do not shorten" in found.why


def test_it_is_named_why_servers_cannot_serve() -> None:
    for cluster, n_servers, why in (
        (flat(8), 0, "there are no servers"),
        (flat(2), 4, "fewer than 3 workers"),
        (default_cluster((0, 0, 1, 1)), 4, "these 4 are on 2"),
    ):
        found = choose_with_servers(100 * MIB, cluster, pool(n_servers))
        assert found.weights is None
        assert found.why.startswith("not by servers, since ")
        assert why in found.why
        assert found.cost_us == choose("all_reduce", 100 * MIB, cluster).cost_us


def test_the_bottleneck_is_named() -> None:
    assert served(8, 12).bottleneck == "the NICs of workers"
    slow_worker = Nics(pool(6).servers, (*[Nic(125, 125)] * 7, Nic(125, 80)))
    found = choose_with_servers(100 * MIB, flat(8, 640), slow_worker)
    assert found.bottleneck == "the NICs of workers"


def test_the_bytes_of_nics_are_counted_from_the_steps_and_halved_by_a_narrow_wire() -> None:
    weights, n_bytes = Weights((2,) * 8, (7,) * 4), 44 * 64 * 8 * 1000
    cost = cost_with_servers(weights, n_bytes, flat(8), pool(4))
    assert cost.network == pytest.approx(n_bytes * 8 / 1000 * 8 * 7 / 44)
    narrow = cost_with_servers(weights, n_bytes, flat(8), pool(4), Codec.BF16)
    assert narrow.network == pytest.approx(cost.network / 2)
    slow = cost_with_servers(weights, n_bytes, flat(8), pool(4, mbit=500))
    assert slow.network == pytest.approx(2 * cost.network)
    # A worker alone sends nothing.
    assert cost_with_servers(Weights((1,)), 100 * MIB, flat(1), pool(0)).network == 0


def test_planning_for_many_workers_and_servers_is_quick() -> None:
    found = choose_with_servers(1 << 30, flat(2048, 10_000), pool(2048, 10_000))
    assert found.weights == Weights((0,) * 2048, (1,) * 2048)
    assert found.bottleneck == "the NICs of workers and servers"


def test_nics_of_too_many_kinds_count_as_the_slowest_of_their_role() -> None:
    rates = [1000 + 7 * (rank * 7919 % 1009) for rank in range(1500)]
    many = Nics(tuple(Nic(rate, rate) for rate in rates))
    found = choose_with_servers(1 << 30, flat(1500, 8000), many)
    assert len(set(found.weights.servers)) == 1


def test_a_pool_of_other_workers_and_nics_without_a_rate_are_refused() -> None:
    with pytest.raises(UsageError, match="NICs of 3 workers, the cluster has 8 hosts"):
        choose_with_servers(MIB, flat(8), Nics(pool(2).servers, pool(3).servers))
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="a NIC carries more than 0"):
            Nics((Nic(rate, 1.0),))
