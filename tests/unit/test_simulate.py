"""The simulator: small schedules worked out by hand, papers' figures, and ranks that stand for all.

Expected times are sums of the described costs, written out; nothing here is read off the simulator.
"""

import itertools
import math
from dataclasses import replace

import pytest

from shoal.analysis.simulate import simulator as module
from shoal.analysis.simulate.simulator import simulate, simulate_steps
from shoal.errors import ProofError, UsageError
from shoal.plan.cluster import Cluster, LinkCost, Nic
from shoal.schedule import ALGORITHMS, Buffer, Copy, Place, Recv, Send, Step
from shoal.schedule.weights import parse

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 128 * KIB
FREE = LinkCost(0, 0, 0)

# A byte takes 0.01 us on a NIC (100 MB/s).
WIRE = LinkCost(latency_us=50, us_per_byte=0.01, message_us=0)


def cluster(n_hosts: int, ranks_per_host: int = 1, **changes: object) -> Cluster:
    hosts = tuple(rank // ranks_per_host for rank in range(n_hosts * ranks_per_host))
    return replace(Cluster(hosts, FREE, WIRE, 0.0, n_cores=64), **changes)  # type: ignore[arg-type]


def time_of(steps: list[list[Step]], n_bytes: int, where: Cluster) -> float:
    return simulate_steps(steps, where, lambda _rank, _place: n_bytes).time_us


def test_a_short_buffer_is_cut_as_the_engine_cuts_it() -> None:
    """In four stripes, which ranks 0, 2, 4 and 6 reduce: rank 1 sends each of them its part."""
    assert simulate("all_reduce", "sharded", cluster(8), 64 * KIB).sent(1) == 64 * KIB
    assert simulate("all_reduce", "sharded", cluster(8), 128 * KIB).sent(1) == 2 * 7 * 16 * KIB


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0)]]
    assert time_of(steps, 1000, cluster(2)) == pytest.approx(50 + 10)


def test_a_large_message_waits_for_its_receivers_word() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0)]]
    n_bytes = 100 * KIB  # more than goes at once
    assert time_of(steps, n_bytes, cluster(2)) == pytest.approx(50 + 50 + n_bytes * 0.01)


def test_a_message_occupies_a_core_of_each_end_and_a_fold_passes_over_its_bytes() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0, fold=True)]]
    where = cluster(2, wire=replace(WIRE, message_us=7), memory_us_per_byte=0.002)
    assert time_of(steps, 1000, where) == pytest.approx((7 + 2) + 50 + 10 + (7 + 2))


def test_bytes_between_hosts_take_a_core_of_each_end_besides_the_pass_over_memory() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0)]]
    where = cluster(2, memory_us_per_byte=0.002, network_us_per_byte=0.004)
    assert time_of(steps, 1000, where) == pytest.approx(6 + 50 + 10 + 6)
    assert time_of(steps, 1000, cluster(1, 2, network_us_per_byte=0.004)) == 0


def test_hosts_that_send_to_several_and_receive_from_several_lose_to_contention() -> None:
    """Each of four sends 1000 bytes to all others: of the three, the second is slowed down."""
    steps: list[list[Step]] = [
        [
            *(Send((rank + k) % 4, chunk=0) for k in (1, 2, 3)),
            *(Recv((rank - k) % 4, chunk=k) for k in (1, 2, 3)),
        ]
        for rank in range(4)
    ]
    ideal, slowed = (time_of(steps, 1000, cluster(4, contention=c)) for c in (0.0, 0.5))
    assert ideal == pytest.approx(50 + 3 * 10)
    assert slowed == pytest.approx(50 + 10 + 15 + 10)


@pytest.mark.parametrize(
    "algorithm", [("gather", "direct"), ("scatter", "direct"), ("all_reduce", "ring")]
)
def test_one_that_many_send_to_loses_nothing_nor_one_that_sends_to_many_nor_a_ring(
    algorithm: tuple[str, str],
) -> None:
    ideal, slowed = (
        simulate(*algorithm, cluster(4, contention=c), 40 * KIB).time_us for c in (0.0, 0.5)
    )
    assert slowed == ideal


@pytest.mark.parametrize(("mib", "is_new"), [(32, False), (33, True)])
def test_scratch_that_no_allocator_keeps_costs_more_where_it_is_touched_first(
    mib: int, is_new: bool
) -> None:
    into = {"into": 0, "into_buffer": Buffer.SCRATCH}
    steps: list[list[Step]] = [[Copy(0, **into), Copy(0, **into, fold=True)], []]
    where = cluster(1, 2, memory_us_per_byte=0.002, fresh_us_per_byte=0.01)
    per_byte = 0.002 + 0.002 + 0.01 * is_new
    assert time_of(steps, mib * MIB, where) == pytest.approx(mib * MIB * per_byte)


def test_ranks_of_a_host_share_its_nic() -> None:
    steps: list[list[Step]] = [[Send(2, 0)], [Send(3, 0)], [Recv(0, 0)], [Recv(1, 0)]]
    assert time_of(steps, 1000, cluster(2, 2)) == pytest.approx(50 + 10 + 10)
    assert time_of(steps, 1000, cluster(4)) == pytest.approx(50 + 10)


def test_messages_into_one_host_share_its_nic() -> None:
    steps: list[list[Step]] = [[Recv(1, 0), Recv(2, 1)], [Send(0, 0)], [Send(0, 0)]]
    assert time_of(steps, 1000, cluster(3)) == pytest.approx(50 + 10 + 10)


def test_both_ways_of_a_nic_are_free_of_each_other() -> None:
    steps: list[list[Step]] = [[Send(1, 0), Recv(1, 1)], [Send(0, 0), Recv(0, 1)]]
    assert time_of(steps, 1000, cluster(2)) == pytest.approx(50 + 10)


def test_ranks_that_outnumber_the_cores_of_a_host_slow_each_other_down() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0)], [], []]
    where = cluster(1, 4, local=LinkCost(0, 0, message_us=3), n_cores=2)
    assert time_of(steps, 1000, where) == pytest.approx(2 * (3 + 3))


def test_a_rested_nic_lets_its_burst_pass_at_once() -> None:
    steps: list[list[Step]] = [[Send(1, 0)], [Recv(0, 0)]]
    n_bytes = 50 * KIB
    where = cluster(2, burst_bytes=20 * KIB)
    assert time_of(steps, n_bytes, where) == pytest.approx(50 + 30 * KIB * 0.01)


def test_segments_follow_one_another_down_a_chain() -> None:
    n_segments = 10
    played = simulate("broadcast", "chain", cluster(4), n_segments * SEGMENT)
    # The word of the first receivers comes at once; then 3 hops for the first segment and one
    # segment's time for each of the others.
    by_hand = 50 + 3 * (50 + SEGMENT * 0.01) + (n_segments - 1) * SEGMENT * 0.01
    assert played.time_us == pytest.approx(by_hand)
    assert played.rounds == 3


def test_links_of_a_host_take_turns() -> None:
    # Rank 0 sends four segments to rank 1 and one to rank 2, which does not wait for all of those.
    steps: list[list[Step]] = [[Send(1, 0), Send(2, 1)], [Recv(0, 0)], [Recv(0, 0), Send(3, 0)]]
    steps.append([Recv(2, 0)])

    def length(rank: int, place: Place) -> int:
        return 4 * SEGMENT if rank == 1 or (place == (0, 0) and rank == 0) else SEGMENT

    played = simulate_steps(steps, cluster(4), length)
    takes = SEGMENT * 0.01
    assert played.time_us == pytest.approx(50 + 50 + 5 * takes)


@pytest.mark.parametrize("n_bytes", [4, 64 * KIB, 3 * MIB])
def test_a_ring_keeps_every_nic_busy(n_bytes: int) -> None:
    n = 8
    played = simulate("all_reduce", "ring", cluster(n), n_bytes)
    assert played.rounds == 2 * (n - 1)
    least = 2 * (n - 1) * 50 + 2 * (n - 1) / n * n_bytes * 0.01
    if n_bytes >= 64 * KIB:  # less than a cache line of each chunk is rounded
        assert played.time_us == pytest.approx(least, rel=0.15)


def test_what_a_ring_sends_is_what_its_authors_say() -> None:
    played = simulate("all_reduce", "ring", cluster(5), 5 * 64 * 1000)
    assert {link.n_bytes for link in played.links} == {8 * 64 * 1000}  # 2(n-1)/n of the buffer
    assert {(link.source, link.peer) for link in played.links} == {
        (rank, (rank + 1) % 5) for rank in range(5)
    }
    assert [(nic.sent, nic.received) for nic in played.nics] == [(512_000, 512_000)] * 5


def test_a_barrier_takes_a_round_for_each_bit() -> None:
    assert simulate("barrier", "dissemination", cluster(8), 1).time_us == pytest.approx(
        3 * (50 + 0.01)
    )


def test_a_schedule_that_waits_for_ever_is_named() -> None:
    steps: list[list[Step]] = [[Recv(1, 0), Send(1, 0)], [Recv(0, 0), Send(0, 0)]]
    with pytest.raises(ProofError, match=r"rank 0 step 0 .* waits for ever"):
        time_of(steps, 1000, cluster(2))


@pytest.mark.parametrize(
    ("n_bytes", "root", "n_calls"), [(-1, 0, 1), (4, 2, 1), (4, -1, 1), (4, 0, 0)]
)
def test_numbers_that_make_no_sense_are_refused(n_bytes: int, root: int, n_calls: int) -> None:
    with pytest.raises(UsageError, match="cannot simulate"):
        simulate("broadcast", "chain", cluster(2), n_bytes, root=root, n_calls=n_calls)


def test_calls_at_a_time_share_the_nics() -> None:
    one = simulate("all_reduce", "ring", cluster(4), 64 * KIB)
    four = simulate("all_reduce", "ring", cluster(4), 64 * KIB, n_calls=4)
    wire_us = 1.5 * 64 * KIB * 0.01
    assert one.time_us == pytest.approx(6 * 50 + wire_us)
    assert four.time_us == pytest.approx(6 * 50 + 4 * wire_us, rel=0.1)


EVERY = [(collective, name) for collective, algorithms in ALGORITHMS.items() for name in algorithms]


@pytest.mark.parametrize(("n_hosts", "ranks_per_host"), [(16, 1), (8, 4), (1, 12)])
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_ranks_that_stand_for_others_tell_the_same_time(
    monkeypatch: pytest.MonkeyPatch, collective: str, name: str, n_hosts: int, ranks_per_host: int
) -> None:
    where = cluster(
        n_hosts,
        ranks_per_host,
        local=LinkCost(2, 0, 1),
        wire=replace(WIRE, message_us=5),
        memory_us_per_byte=0.0001,
    )
    n_bytes = where.size * 8 * KIB
    whole = simulate(collective, name, where, n_bytes)
    assert whole.n_simulated == where.size
    monkeypatch.setattr(module, "_FEW_STEPS", 0)
    folded = simulate(collective, name, where, n_bytes)
    assert folded.time_us == pytest.approx(whole.time_us, rel=1e-6)
    assert folded.rounds == whole.rounds
    assert folded.busy_us == pytest.approx(whole.busy_us)
    assert sum(link.n_bytes * link.n_alike for link in folded.links) == sum(
        link.n_bytes for link in whole.links
    )


def test_symmetric_algorithms_need_one_host_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_STEPS", 0)
    alike = {"ring", "sharded", "halving", "ring_2d", "fairring", "sharded/ring"}
    for name in sorted(alike):
        assert simulate("all_reduce", name, cluster(16, 2), MIB).n_simulated == 2, name
    assert simulate("all_reduce", "tree", cluster(16, 2), MIB).n_simulated == 32


def test_a_rank_that_differs_is_not_taken_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_STEPS", 0)
    for root in (0, 1, 5):
        played = simulate("broadcast", "direct", cluster(8), MIB, root=root)
        assert played.n_simulated == 8


@pytest.mark.parametrize("name", ["tree", "doubling", "ring", "ring/tree"])
def test_the_first_segments_tell_the_time_of_the_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where = cluster(16, 2)
    whole = simulate("all_reduce", name, where, 24 * MIB)
    monkeypatch.setattr(module, "_MAX_SEGMENTS", 8_000)
    assert simulate("all_reduce", name, where, 24 * MIB).time_us == pytest.approx(
        whole.time_us, rel=0.05
    )


@pytest.mark.parametrize(
    ("collective", "name", "n_bytes"),
    [
        ("broadcast", "scatter_gather", 8 * MIB),
        ("reduce", "scatter_gather", 8 * MIB),
        ("all_reduce", "direct", 4 * KIB),
    ],
)
def test_smaller_groups_tell_the_time_of_one_too_large_to_simulate(
    monkeypatch: pytest.MonkeyPatch, collective: str, name: str, n_bytes: int
) -> None:
    where = cluster(128, wire=replace(WIRE, message_us=5))
    whole = simulate(collective, name, where, n_bytes)
    monkeypatch.setattr(module, "_MAX_STEPS", 30_000)
    told = simulate(collective, name, where, n_bytes)
    assert told.extrapolated_from[1] in {32, 64}
    assert told.time_us == pytest.approx(whole.time_us, rel=0.2)
    assert told.rounds == pytest.approx(whole.rounds, abs=2)
    assert told.busy_us == whole.busy_us


def test_a_ring_of_2048_ranks_is_simulated_whole() -> None:
    played = simulate("all_reduce", "ring", cluster(256, 8), 100 * MIB)
    assert played.rounds == 2 * 2047
    assert played.sent(0) == pytest.approx(2 * 2047 / 2048 * 100 * MIB, rel=0.001)


def test_every_way_in_and_out_is_counted() -> None:
    played = simulate("all_to_all", "pairwise", cluster(3, 2), 1000)
    assert len(played.links) == len(list(itertools.permutations(range(6), 2)))
    assert {link.n_bytes for link in played.links} == {1000}
    assert [(nic.sent, nic.received) for nic in played.nics] == [(8000, 8000)] * 3


# With servers.


def test_a_nic_that_is_slower_takes_longer_on_its_way_alone() -> None:
    steps: list[list[Step]] = [[Send(1, 0), Recv(1, 0)], [Recv(0, 0), Send(0, 0)]]
    slow = Nic(out=25, into=50)
    for where, there, back in (
        (cluster(2), 10, 10),
        (cluster(2, nics=(Nic(100, 100), slow)), 20, 40),
        (cluster(2, nics=(slow, Nic(100, 100))), 40, 20),
    ):
        assert time_of(steps, 1000, where) == pytest.approx(50 + there + 50 + back)
    played = simulate_steps(
        steps, cluster(2, nics=(Nic(100, 100), slow)), lambda _rank, _place: 1000
    )
    assert (played.busiest, played.busy_us) == ("the NIC out of host 1", 40)


def test_servers_take_from_all_workers_at_once_and_send_back_as_they_fold() -> None:
    """Segments follow one another: what is left is one round of them, and the first on its way."""
    n, n_segments = 4, 50
    played = simulate("all_reduce", "sharded[4*0|4*1]", cluster(8), n * n_segments * SEGMENT)
    once = n * n_segments * SEGMENT * 0.01
    assert once < played.time_us < once + (n + 1) * SEGMENT * 0.01 + 4 * 50
    assert all(nic.sent == nic.received == n * n_segments * SEGMENT for nic in played.nics)


@pytest.mark.parametrize("name", ["sharded[16*0|16*1]", "sharded[24*1|16*3]", "sharded[8*1|24*1]"])
def test_a_few_workers_and_servers_stand_for_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, parse(name)[0]))
    whole = simulate("all_reduce", name, cluster(size), 48 * MIB)
    monkeypatch.setattr(module, "_FEW_STEPS", 0)
    few = simulate("all_reduce", name, cluster(size), 48 * MIB)
    assert (whole.n_simulated, few.n_simulated) == (
        size,
        size // math.gcd(*map(len, parse(name)[0])),
    )
    assert few.time_us == pytest.approx(whole.time_us, rel=0.02)
    assert few.n_bytes == pytest.approx(whole.n_bytes, rel=0.001)


def test_thousands_of_workers_and_servers_are_simulated_whole() -> None:
    played = simulate("all_reduce", "sharded[2048*0|2048*1]", cluster(4096), 1 << 30)
    once = (1 << 30) * 0.01
    # Four segments of each server's share: the last of them has still to come back.
    assert once < played.time_us < once * (1 + 1.01 / 4)
    assert (played.n_simulated, played.rounds) == (2, 2)
