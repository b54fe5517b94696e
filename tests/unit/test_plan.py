"""The planner: the cheapest algorithm, equal on all ranks, with a reason; costs and quantities."""

import itertools
import logging
import sys
from dataclasses import replace

import pytest
from unit.test_counts import blocks

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.plan import Cluster, LinkCost, Planner, Settings, default_cluster
from shoal.plan.choose import can_serve, candidates, choose, floor_of
from shoal.plan.cluster import numbered
from shoal.plan.cost import cost_of
from shoal.plan.defaults import wire_of
from shoal.plan.planner import size_class
from shoal.plan.quantities import bytes_of, bytes_per_us, microseconds
from shoal.plan.settings import Forced, forced_from
from shoal.plan.text import show_bytes
from shoal.schedule import ALGORITHMS, COLLECTIVES, find
from shoal.schedule.counts import count

ONE_HOST = default_cluster((0, 0, 0, 0))
FOUR_HOSTS = default_cluster((0, 1, 2, 3))
SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 25 << 20, 1 << 28)


CLUSTERS = [ONE_HOST, FOUR_HOSTS, default_cluster((0, 0)), default_cluster((0,) * 8)]
CLUSTERS += [default_cluster(blocks(4, 4)), default_cluster((0, 1, 0, 1, 1))]


def test_small_buffers_are_not_cut_and_large_ones_use_shards_or_a_ring() -> None:
    small = find("all_reduce", choose("all_reduce", 4, ONE_HOST).name)
    assert small.fitted(4, ONE_HOST.size).n_chunks(ONE_HOST.size) == 1
    assert choose("all_reduce", 25 << 20, ONE_HOST).name == "sharded"
    two = choose("all_reduce", 25 << 20, default_cluster((0, 0))).name
    assert two not in ("direct", "doubling")
    assert choose("all_reduce", 25 << 20, FOUR_HOSTS).name == "ring"
    # Measured with fewer cores than ranks: two rounds of shards beat a tree's many rounds.
    for size, kib in ((4, 64), (4, 256), (8, 32), (8, 64), (8, 256), (16, 32)):
        assert choose("all_reduce", kib << 10, default_cluster((0,) * size)).name == "sharded"


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_choice_is_a_candidate_and_costs_grow(collective: str, cluster: Cluster) -> None:
    choices = [choose(collective, n_bytes, cluster) for n_bytes in SIZES]
    for choice, n_bytes in zip(choices, SIZES, strict=True):
        assert choice.name in candidates(collective, n_bytes, cluster)
        assert find(collective, choice.name)
    costs = [choice.cost_us for choice in choices]
    assert costs == sorted(costs)
    assert costs[0] > 0
    for n_bytes in SIZES if collective in ("all_gather", "reduce_scatter", "all_to_all") else ():
        assert find(collective, choose(collective, n_bytes, cluster, uneven=True).name).takes_uneven
    # Groups of one rank and calls without bytes are planned too.
    assert choose(collective, 1 << 20, default_cluster((0,))).name in ALGORITHMS[collective]
    assert choose(collective, 0, cluster).name in ALGORITHMS[collective]


def test_a_faster_wire_never_makes_a_call_slower() -> None:
    for n_bytes in SIZES:
        costs = []
        for gbit in (1, 10, 100):
            wire = LinkCost(latency_us=30.0, us_per_byte=8e-3 / gbit, message_us=5.0)
            cluster = default_cluster(blocks(8, 2), wire=wire)
            costs.append(choose("all_reduce", n_bytes, cluster).cost_us)
        assert costs == sorted(costs, reverse=True)


def test_a_reason_names_the_call_the_winner_its_bottleneck_and_the_next_best() -> None:
    choice = choose("all_gather", 1 << 20, ONE_HOST)
    assert choice.why.startswith(f"1 MiB over 4 ranks in one host: {choice.name} takes ")
    assert all(f"{name} " in choice.why for name in candidates("all_gather", 1 << 20, ONE_HOST))
    slow = LinkCost(latency_us=30.0, us_per_byte=1.0, message_us=5.0)
    far = LinkCost(latency_us=1e4, us_per_byte=1e-4, message_us=5.0)
    for n_bytes, cluster, bottleneck in (
        (25 << 20, default_cluster((0, 1), wire=slow), "network"),
        (4, default_cluster((0, 1), wire=far), "latency"),
        (25 << 20, default_cluster((0,) * 8), "memory"),
    ):
        assert bottleneck in choose("all_reduce", n_bytes, cluster).why


@pytest.mark.parametrize("mib", [1, 4, 25, 100, 256])
@pytest.mark.parametrize("gbit", [1, 10, 25, 100])
def test_cores_matter_little_where_the_nic_is_the_bottleneck(gbit: int, mib: int) -> None:
    """Two hosts exchange equal bytes by any algorithm; `direct` folds twice as much."""
    wire = LinkCost(latency_us=30.0, us_per_byte=8e-3 / gbit, message_us=5.0)
    two = default_cluster((0, 1), wire=wire)
    name = choose("all_reduce", mib << 20, two).name
    assert name in ("sharded", "ring", "tree", "halving")
    chosen, direct = (cost_of("all_reduce", one, mib << 20, two) for one in (name, "direct"))
    assert chosen.network == direct.network
    assert chosen.work_us < direct.work_us


@pytest.mark.parametrize("n_bytes", [4, 4 << 10, 64 << 10, 100_000, 1 << 20, 25 << 20, 100 << 20])
@pytest.mark.parametrize("here", [1, 8])
@pytest.mark.parametrize("size", [8, 256, 2048])
def test_no_shard_that_crosses_a_wire_is_too_short(size: int, here: int, n_bytes: int) -> None:
    cluster = default_cluster(blocks(size // here, here))
    choice = choose("all_reduce", n_bytes, cluster)
    algorithm = find("all_reduce", choice.name).fitted(n_bytes, size)
    n_chunks = algorithm.n_chunks(size, cluster.hosts)
    assert n_chunks == 1 or n_bytes / n_chunks >= floor_of(cluster)


def test_sharded_is_no_candidate_where_few_ranks_of_a_host_would_fold_all() -> None:
    for size, kib, is_one in ((4, 16, True), (8, 64, True), (16, 128, False), (8, 128, True)):
        names = candidates("all_reduce", kib << 10, default_cluster((0,) * size))
        assert ("sharded" in names) == is_one
    # Between hosts a short buffer has fewer shards than ranks.
    assert choose("all_reduce", 64 << 10, default_cluster(range(8))).name == "sharded"
    assert find("all_reduce", "sharded").fitted(64 << 10, 8).n_chunks(8) == 4


def test_ranks_with_a_core_each_do_not_wait_for_one() -> None:
    alone, crowded = (default_cluster((0,) * 4, n_cores=n) for n in (4, 2))
    assert cost_of("all_reduce", "direct", 4, alone).fill == alone.local.latency_us
    assert cost_of("all_reduce", "direct", 4, crowded).fill > 4 * crowded.local.latency_us


@pytest.mark.parametrize(
    ("size", "at_first", "again"), [(64, 50_000, 2_500), (2048, 1_000_000, 10_000)]
)
def test_a_choice_takes_few_function_calls(size: int, at_first: int, again: int) -> None:
    """Count them, because a clock would measure the machine; ten take about a microsecond."""
    cluster = default_cluster(blocks(size // 4, 4))
    for cache in (choose, count):
        cache.cache_clear()
    n_calls = 0

    def count_one(_frame: object, event: str, _what: object) -> None:
        nonlocal n_calls
        n_calls += event in {"call", "c_call"}

    for n_bytes, most in ((1 << 28, at_first), (1 << 27, again)):
        n_calls = 0
        sys.setprofile(count_one)
        try:
            choose("all_reduce", n_bytes, cluster)
        finally:
            sys.setprofile(None)
        assert 100 < n_calls < most


def test_choices_are_made_and_logged_once_per_doubling(caplog: pytest.LogCaptureFixture) -> None:
    assert [size_class(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]
    planner = Planner(ONE_HOST, title="group 'world'", level=logging.INFO)
    with caplog.at_level(logging.INFO, "shoal"):
        for n_bytes in (1000, 1024, 1000, 1025):
            planner.choose("all_reduce", n_bytes)
    assert planner.choose("all_reduce", 1025) is planner.choose("all_reduce", 2048)
    assert planner.choose("all_reduce", 1025).why.startswith("2 KiB")
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("group 'world': all_reduce of up to 1 KiB: ")


def test_choices_shown_in_a_table_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    sizes = dict.fromkeys((1 << power for power in range(2, 31)), Codec.IDENTITY)
    planner, other = Planner(ONE_HOST, level=logging.INFO), Planner(ONE_HOST)
    with caplog.at_level(logging.INFO, "shoal"):
        table = planner.table("all_reduce", sizes)
        for n_bytes in sizes:
            planner.choose("all_reduce", n_bytes)
        assert not caplog.messages
        planner.choose("all_reduce", 1 << 31)  # larger than any size in the table
        planner.choose("broadcast", 4)
    assert len(caplog.messages) == 2
    shown = {last: name for name, _, _, last in (one.split(" ", 3) for one in table.split(", "))}
    runs = itertools.groupby(sizes, lambda n_bytes: other.choose("all_reduce", n_bytes).name)
    assert shown == {show_bytes(list(run)[-1]): name for name, run in runs}
    assert len(shown) > 1


def test_a_subgroup_is_planned_for_its_own_hosts_with_the_links_of_the_world() -> None:
    wire = LinkCost(latency_us=7.0, us_per_byte=0.5, message_us=3.0)
    world = Planner(default_cluster((0, 0, 1, 1, 2, 2), n_cores=4, wire=wire))
    part = world.of([4, 2, 5])
    assert part.cluster == default_cluster((0, 1, 0), n_cores=4, wire=wire)
    assert world.of([2, 3]).cluster.n_hosts == 1
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 0, 1, 1, 1)])
def test_ranks_that_cut_a_buffer_differently_choose_the_same(hosts: tuple[int, ...]) -> None:
    """A rank that passes lists chooses without a length, unknown to the others."""
    cluster = default_cluster(hosts, n_cores=4)
    for collective, row in COLLECTIVES.items():
        for n_bytes in (0, 1, 4096, 64 << 10, 16 << 20) if row.by_pair else ():
            whole = choose(collective, n_bytes, cluster)
            assert whole.name == choose(collective, 0, cluster, uneven=True).name, n_bytes


def test_a_forced_algorithm_wins_where_the_collective_has_it() -> None:
    planner = Planner(ONE_HOST, forced_from({"SHOAL_ALGO": "ring"}))
    assert planner.choose("all_reduce", 4).name == "ring"
    assert planner.choose("all_reduce", 4).why == "set by SHOAL_ALGO"
    assert planner.choose("broadcast", 4).name in ALGORITHMS["broadcast"]
    forced = forced_from({"SHOAL_ALGO": "ring, all_reduce:sharded ,broadcast:chain"})
    names = [forced.of(c) for c in ("all_reduce", "broadcast", "all_gather")]
    assert names == ["sharded", "chain", "ring"]


def test_a_forced_algorithm_that_cannot_serve_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    planner = Planner(ONE_HOST, forced_from({"SHOAL_ALGO": "reduce_scatter:ring"}))
    assert planner.choose("reduce_scatter", 4096).name == "ring"
    for n_bytes in (4096, 4096, 65536):
        assert planner.choose("reduce_scatter", n_bytes, uneven=True).name == "direct"
    assert planner.of([0, 1]).choose("reduce_scatter", 4096, uneven=True).name == "direct"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "reduce_scatter by ring, which cannot serve uneven blocks" in warnings[0]
    world = Planner(ONE_HOST, forced_from({"SHOAL_ALGO": "all_reduce:sharded[4*1|]"}))
    assert world.choose("all_reduce", 4096).name == "sharded[4*1|]"
    assert world.of([0, 1]).choose("all_reduce", 4096).name != "sharded[4*1|]"
    assert "sharded[4*1|], which cannot serve this group" in caplog.text


def test_weights_can_be_forced_where_all_ranks_are_workers() -> None:
    cluster = default_cluster(range(4))
    for can, names in (
        (False, ["sharded[4*1|2*3].workers", "sharded[2*1|2*1]", "sharded[2*1|2*1].servers"]),
        (True, ["sharded[4*1|]", "sharded[3,1,1,2|]", "sharded[4*1|].workers"]),
    ):
        for name in names:
            assert can_serve("all_reduce", name, cluster) == can
            assert (choose("all_reduce", 1 << 20, cluster, name).name == name) == can


def test_a_wrong_variable_is_named() -> None:
    wrong = {
        "SHOAL_ALGO=rign": r"'rign' is not an algorithm; known are .* tree, sharded\[",
        "SHOAL_ALGO=all_reduce:rign": "'all_reduce:rign': no algorithm 'rign' for all_reduce",
        "SHOAL_ALGO=all_reduc:ring": "no collective 'all_reduc': there are all_reduce",
        "SHOAL_ALGO=ring,sharded": "both ring and sharded for all collectives",
        "SHOAL_ALGO=send": "'send' is not an algorithm",
        "SHOAL_TUNING=/nowhere/at/all": "/nowhere/at/all",
        "SHOAL_DEBUG=LOUD": "one of INFO, DEBUG",
        "SHOAL_TUNING_MISMATCH=maybe": "maybe",
        "SHOAL_WIRE=fp4": "fp4",
        "SHOAL_PATHS=0": "from 1 to 8",
        "SHOAL_PATHS=9": "from 1 to 8",
    }
    assert Settings.read({}) == Settings(Forced(), link=None, tuning=None, refuse=True)
    for setting, why in wrong.items():
        with pytest.raises(UsageError, match=why):
            Settings.read(dict([setting.split("=")]))


def test_shoal_debug_writes_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("shoal")
    before, level = list(log.handlers), log.level
    try:
        for _ in range(2):
            Settings.read({"SHOAL_DEBUG": "INFO"})
        Planner(ONE_HOST, title="group 'g'", level=logging.INFO).choose("broadcast", 4)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("shoal INFO group 'g': broadcast of up to 4 B: ")
    finally:
        log.handlers[:] = before
        log.setLevel(level)


def test_quantities_are_read() -> None:
    for read, values in (
        (bytes_of, {"0": 0, "4": 4, "4B": 4, "100MB": 100_000_000, "100MiB": 104_857_600}),
        (bytes_of, {"0.5 KiB": 512, "2kB": 2000, "1GiB": 1 << 30, "64K": 65536, "1g": 1 << 30}),
        (bytes_per_us, {"8Mb": 1, "25Gb": 3125, "25Gbit/s": 3125, "10Gbps": 1250}),
        (bytes_per_us, {"3GB/s": 3000, "400mbit": 50, "1gbit": 125, "8kbit": 0.001}),
        (microseconds, {"20us": 20, "1.5ms": 1500, "500ns": 0.5, "2s": 2e6}),
    ):
        assert {text: read(text) for text in values} == pytest.approx(values)


def test_text_that_is_no_quantity_is_refused() -> None:
    for read, what, texts in (
        (bytes_of, "bytes", ["", "-1", "4b", "4 parsecs", "1e999B", "nanB", "MiB", "4MiBs"]),
        (bytes_of, "bytes", ["9" * 400]),
        (bytes_per_us, "rate", ["", "25", "25G", "0Gb", "-25Gb", "25GHz", "infGb", "25mb", "1gB"]),
        (microseconds, "time", ["", "20", "-20us", "20 years"]),
    ):
        for text in texts:
            with pytest.raises(UsageError, match=f"cannot read the {what}"):
                read(text)


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
