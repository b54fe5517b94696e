"""Counts equal those of all ranks' steps."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter

import pytest
from programs import EVERY

from shoal.analysis.dataflow import Dataflow
from shoal.plan import default_cluster
from shoal.plan.choose import choose
from shoal.schedule import ALGORITHMS, Algorithm, Buffer, Copy, Recv, Send, Step, find
from shoal.schedule.counts import count
from shoal.schedule.stripes import STRIPE_FLOOR_BYTES
from shoal.schedule.traffic import StepCounts, Traffic

CANDIDATES = ["sharded/ring", "sharded/tree", "sharded/halving", "sharded/doubling"]
FLAT = [name for name, one in ALGORITHMS["all_reduce"].items() if not one.by_host]
INSIDE = [name for name in FLAT if ALGORITHMS["all_reduce"][name].owner_rule]
HIERARCHIES = [f"{local}/{across}" for local in INSIDE for across in FLAT]


def blocks(n_hosts: int, here: int) -> tuple[int, ...]:
    return tuple(rank // here for rank in range(n_hosts * here))


HOSTS = [(0,) * size for size in (1, 2, 3, 7, 8)]
HOSTS += [blocks(4, 1), blocks(5, 1), blocks(8, 1), blocks(2, 4), blocks(3, 3), blocks(4, 4)]
HOSTS += [(0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1, 1, 2, 2), (0, 1, 2, 2, 0, 1, 2)]
IS_SOAK = bool(os.environ.get("SHOAL_SOAK"))
LARGER = [blocks(2, 33), tuple(rank % 5 for rank in range(32))]
LARGER.append(tuple(host for host in range(9) for _ in range(host % 4 + 1)))
if IS_SOAK:
    LARGER += [(0,) * 64, blocks(16, 4), blocks(64, 1), blocks(9, 9), blocks(12, 7)]


def by_rank(collective: str, name: str, hosts: tuple[int, ...], n_bytes: int) -> list[StepCounts]:
    """Return the counts of every rank, step by step."""
    size, works = len(hosts), []
    algorithm = find(collective, name).fitted(n_bytes, size)
    for rank in range(size):
        n: Counter[str] = Counter()
        written: Counter[tuple[Buffer, int]] = Counter()
        read = set()
        for step in algorithm.steps(rank, size, 0, hosts):
            if isinstance(step, Copy):
                n["moved"] += 1
                written[step.into_buffer, step.into] += 1
            if not isinstance(step, Send | Recv):
                continue
            is_inter = hosts[rank] != hosts[step.peer]
            n["inter" if is_inter else "intra"] += 1
            version = written[step.buffer, step.chunk]
            if isinstance(step, Recv):
                n["moved"] += 1
                n["received"] += is_inter
                n["before"] += is_inter and not n["has_passed_on"]
                written[step.buffer, step.chunk] += 1
                continue
            n["has_passed_on"] |= version > 0
            n["moved"] += is_inter
            n["sent"] += is_inter
            n["passed_on"] += is_inter and version > 0
            # Peers on the host read one copy of a value; the kernel makes one copy for each.
            value = (step.buffer, step.chunk, version)
            n["shared"] += not is_inter and value not in read
            read |= set() if is_inter else {value}
        works.append(StepCounts(**{field: n[field] for field in StepCounts._fields}))
    return works


def n_peers(algorithm: Algorithm, hosts: tuple[int, ...]) -> int:
    """Return the largest number of other hosts that a rank exchanges with, both ways."""
    size, most = len(hosts), 0
    for rank, here in enumerate(hosts):
        steps = list(algorithm.steps(rank, size, 0, hosts))
        to = {hosts[step.peer] for step in steps if isinstance(step, Send)} - {here}
        of = {hosts[step.peer] for step in steps if isinstance(step, Recv)} - {here}
        most = max(most, min(len(to), len(of)))
    return most


def assert_exact(collective: str, name: str, hosts: tuple[int, ...], n_bytes: int) -> None:
    size = len(hosts)
    algorithm = find(collective, name).fitted(n_bytes, size)
    counts = count(algorithm, hosts)
    works = by_rank(collective, name, hosts, n_bytes)
    by_host = defaultdict[int, list[StepCounts]](list)
    for work, host in zip(works, hosts, strict=True):
        by_host[host].append(work)
    totals = [StepCounts(*map(sum, zip(*own, strict=True))) for own in by_host.values()]
    assert set(counts.ranks) == set(works)
    assert set(counts.hosts) == set(totals)
    assert counts.n_scratch == max(len(algorithm.scratch(r, size, hosts)) for r in range(size))
    assert counts.n_peers == n_peers(algorithm, hosts)


@pytest.mark.parametrize(("collective", "name"), EVERY + [("all_reduce", n) for n in HIERARCHIES])
def test_counts_equal_the_steps_of_all_ranks(collective: str, name: str) -> None:
    for hosts in HOSTS:
        assert_exact(collective, name, hosts, len(hosts) * STRIPE_FLOOR_BYTES)


@pytest.mark.parametrize(("collective", "name"), EVERY + [("all_reduce", n) for n in CANDIDATES])
def test_counts_of_larger_groups_and_of_unequal_hosts_are_right(collective: str, name: str) -> None:
    for hosts in LARGER:
        assert_exact(collective, name, hosts, 1 << 30)


@pytest.mark.parametrize("hosts", [(0,) * 8, blocks(8, 1), blocks(4, 4), blocks(3, 3)], ids=str)
def test_reducers_of_a_short_buffer_are_counted_exactly(hosts: tuple[int, ...]) -> None:
    size, algorithm = len(hosts), find("all_reduce", "sharded")
    for n_stripes in (1, 3, 4, 8, 16):
        n_bytes = n_stripes * STRIPE_FLOOR_BYTES
        assert algorithm.fitted(n_bytes, size).n_chunks(size) == min(n_stripes, size)
        assert_exact("all_reduce", "sharded", hosts, n_bytes)


def renamed(traffic: Traffic, rename: Callable[[int], int]) -> tuple[object, ...]:
    """Return the messages of a rank with its peers renamed."""
    sends, receives = (
        Counter(one._replace(peers=frozenset(map(rename, one.peers))) for one in of)
        for of in (traffic.sends, traffic.receives)
    )
    return sends, receives, traffic.n_copies


SIZES = range(1, 65) if IS_SOAK else (*range(1, 10), 13, 16, 17, 31, 32)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_representative_rank_makes_the_steps_of_the_others(collective: str, name: str) -> None:
    for size in SIZES:
        for n_stripes in (size, 5):
            algorithm = find(collective, name).fitted(n_stripes * STRIPE_FLOOR_BYTES, size)
            traffic = [Traffic.of(algorithm.steps(rank, size)) for rank in range(size)]
            scratch = [len(algorithm.scratch(rank, size)) for rank in range(size)]
            for rank in range(size):
                one = algorithm.alike_rule(rank, size)
                own = renamed(traffic[rank], lambda peer: peer)
                assert own == renamed(traffic[one.rank], one.rename), (size, n_stripes, rank)
                assert scratch[rank] == scratch[one.rank], (size, n_stripes, rank)


def test_a_few_ranks_represent_all_where_each_has_many_steps() -> None:
    for collective, name in EVERY:
        algorithm = ALGORITHMS[collective][name].fitted(1 << 30, 2048)
        if algorithm.levels:
            continue
        some = {algorithm.alike_rule(rank, 2048).rank for rank in range(2048)}
        assert sum(1 for rank in some for _ in algorithm.steps(rank, 2048)) < 150_000, name


def assert_made_of_messages(chain: Sequence[tuple[int, int]], steps: list[list[Step]]) -> None:
    for rank, peer in chain:
        assert any(isinstance(step, Send) and step.peer == peer for step in steps[rank])


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_chain_is_as_long_as_in_the_dataflow(collective: str, name: str) -> None:
    algorithm = ALGORITHMS[collective][name]
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17):
        steps = [list(algorithm.steps(rank, size)) for rank in range(size)]
        chain = algorithm.chain(size)
        assert len(chain) == longest(Dataflow(steps)), size
        assert_made_of_messages(chain, steps)


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(4, 4), blocks(3, 3), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("name", ["ring_2d", "fairring", *CANDIDATES])
def test_the_chain_of_a_hierarchy_spans_both_levels(name: str, hosts: tuple[int, ...]) -> None:
    algorithm = find("all_reduce", name)
    steps = [list(algorithm.steps(rank, len(hosts), 0, hosts)) for rank in range(len(hosts))]
    chain = algorithm.chain(len(hosts), hosts)
    assert len(chain) <= longest(Dataflow(steps)) <= 1.5 * len(chain)
    assert_made_of_messages(chain, steps)


def longest(flow: Dataflow) -> int:
    """Return the messages of the longest chain; each step follows its causes."""
    causes = {
        number: [*waits, *([partner] if partner >= 0 and not isinstance(step, Send) else [])]
        for number, (step, waits, partner) in enumerate(
            zip(flow.steps, flow.waits_for, flow.partner_of, strict=True)
        )
    }
    return max(flow.rounds(list(TopologicalSorter(causes).static_order())), default=0)


def test_no_all_reduce_is_predicted_faster_than_the_nics_allow() -> None:
    for n_hosts, n_ranks in ((5, 4), (8, 4), (4, 8), (6, 4), (8, 8), (16, 4), (16, 8)):
        cluster = default_cluster(blocks(n_hosts, n_ranks))
        n_bytes = 256 << 20
        least_us = 2 * (n_hosts - 1) / n_hosts * n_bytes * cluster.wire.us_per_byte
        assert choose("all_reduce", n_bytes, cluster).cost_us >= least_us
