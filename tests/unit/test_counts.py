"""What is counted of some ranks' steps is what all of their steps say."""

from collections import Counter
from collections.abc import Iterable

import pytest

from shoal.analysis.dataflow import Dataflow
from shoal.plan import choose, default_cluster
from shoal.schedule import ALGORITHMS, Buffer, Copy, Recv, Send, find
from shoal.schedule.counts import Counts, StepCounts, count
from shoal.schedule.stripes import STRIPE_FLOOR_BYTES

ALL = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]
HIERARCHIES = ["sharded/ring", "sharded/tree", "sharded/halving", "sharded/doubling"]


def blocks(n_hosts: int, here: int) -> tuple[int, ...]:
    return tuple(rank // here for rank in range(n_hosts * here))


HOSTS = [
    *((0,) * 2, (0,) * 3, (0,) * 7, (0,) * 8),
    *(blocks(4, 1), blocks(5, 1), blocks(8, 1), blocks(2, 4), blocks(3, 3), blocks(4, 4)),
    *((0, 1, 0, 1), (0, 0, 0, 1, 1)),
]


def by_rank(collective: str, name: str, hosts: tuple[int, ...], n_bytes: int) -> list[StepCounts]:
    """Of every rank, counted one step after the other."""
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
            # Peers on the host read one copy of a value; the kernel copies for each.
            value = (step.buffer, step.chunk, version)
            n["shared"] += not is_inter and value not in read
            read |= set() if is_inter else {value}
        works.append(StepCounts(**{field: n[field] for field in StepCounts._fields}))
    return works


def sum_of(works: list[StepCounts]) -> StepCounts:
    return StepCounts(*map(sum, zip(*works, strict=True)))


def busiest_nic(works: Iterable[StepCounts]) -> float:
    return max(max(work.sent, work.received) for work in works)


def most_work(works: Iterable[StepCounts]) -> float:
    return max(work.intra + work.inter + work.shared + work.moved for work in works)


def counted(
    collective: str, name: str, hosts: tuple[int, ...], n_bytes: int
) -> tuple[Counts, list[StepCounts], list[StepCounts]]:
    """What `count` says, and of which ranks and hosts it can be true."""
    counts = count(find(collective, name).fitted(n_bytes, len(hosts)), hosts)
    works = by_rank(collective, name, hosts, n_bytes)
    totals = [
        sum_of([work for work, host in zip(works, hosts, strict=True) if host == one])
        for one in range(max(hosts) + 1)
    ]
    return counts, works, totals


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(("collective", "name"), ALL + [("all_reduce", one) for one in HIERARCHIES])
def test_small_groups_are_counted_exactly(
    collective: str, name: str, hosts: tuple[int, ...]
) -> None:
    n_bytes = len(hosts) * STRIPE_FLOOR_BYTES
    counts, works, totals = counted(collective, name, hosts, n_bytes)
    assert set(counts.ranks) <= set(works)
    assert set(counts.hosts) <= set(totals)
    for field in StepCounts._fields:
        busiest = (max(getattr(work, field) for work in of) for of in (works, counts.ranks))
        assert len(set(busiest)) == 1 or hosts == (0, 1, 0, 1), field


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("n_stripes", [4, 8, 16])
@pytest.mark.parametrize("hosts", [(0,) * 8, blocks(8, 1), blocks(4, 4)], ids=str)
def test_fewer_reducers_of_a_short_buffer_are_counted_exactly(
    k: int, hosts: tuple[int, ...], n_stripes: int
) -> None:
    n_bytes = n_stripes * STRIPE_FLOOR_BYTES
    counts, works, totals = counted("all_reduce", f"sharded({k})", hosts, n_bytes)
    assert counts.n_chunks == min(n_stripes, len(hosts))
    for field in StepCounts._fields:
        for said, is_so in ((counts.ranks, works), (counts.hosts, totals)):
            assert max(getattr(work, field) for work in said) == max(
                getattr(work, field) for work in is_so
            )


@pytest.mark.parametrize("hosts", [(0,) * 64, blocks(16, 4), blocks(64, 1), blocks(9, 7)], ids=len)
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_of_larger_groups_some_ranks_tell_what_the_busiest_host_does(
    collective: str, name: str, hosts: tuple[int, ...]
) -> None:
    counts, _, totals = counted(collective, name, hosts, 1 << 30)
    within = 1.5 if len(hosts) == 64 else 2.2
    for said, is_so in zip(
        *([by(of) for by in (busiest_nic, most_work)] for of in (counts.hosts, totals)), strict=True
    ):
        assert is_so / within <= said <= is_so * within


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33])
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_a_chain_is_as_long_as_the_longest_of_the_dataflow_and_made_of_messages(
    collective: str, name: str, size: int
) -> None:
    algorithm = ALGORITHMS[collective][name]
    steps = [list(algorithm.steps(rank, size)) for rank in range(size)]
    chain = algorithm.chain(size)
    assert len(chain) == longest(Dataflow(steps))
    assert set(chain) <= {
        (rank, step.peer) for rank in range(size) for step in steps[rank] if isinstance(step, Send)
    }


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(4, 4), blocks(3, 3), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("name", ["ring_2d", "fairring", *HIERARCHIES])
def test_the_chain_of_a_hierarchy_is_that_of_both_levels(name: str, hosts: tuple[int, ...]) -> None:
    algorithm = find("all_reduce", name)
    steps = [list(algorithm.steps(rank, len(hosts), 0, hosts)) for rank in range(len(hosts))]
    chain = algorithm.chain(len(hosts), hosts)
    assert len(chain) <= longest(Dataflow(steps)) <= 1.5 * len(chain)
    assert set(chain) <= {
        (rank, step.peer)
        for rank, own in enumerate(steps)
        for step in own
        if isinstance(step, Send)
    }


def longest(flow: Dataflow) -> int:
    """Messages of the longest chain: steps in an order in which each comes after its causes."""
    causes = [
        [*waits, *([partner] if partner >= 0 and not isinstance(step, Send) else [])]
        for step, waits, partner in zip(flow.steps, flow.waits_for, flow.partner_of, strict=True)
    ]
    results: list[list[int]] = [[] for _ in causes]
    for step, own in enumerate(causes):
        for cause in own:
            results[cause].append(step)
    left = [len(own) for own in causes]
    order = [step for step, n in enumerate(left) if n == 0]
    for step in order:
        for result in results[step]:
            left[result] -= 1
            if left[result] == 0:
                order.append(result)
    return max(flow.rounds(order), default=0)


@pytest.mark.parametrize(("n_hosts", "n_ranks"), [(16, 8), (32, 4), (12, 7)])
@pytest.mark.parametrize("name", ["sharded/tree", "sharded/ring", "ring_2d", "tree/tree"])
def test_some_hosts_of_a_large_group_send_as_much_as_the_busiest_of_all(
    name: str, n_hosts: int, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tuple(host for host in range(n_hosts) for _ in range(n_ranks))
    algorithm = find("all_reduce", name)
    some = count.__wrapped__(algorithm, hosts)
    monkeypatch.setattr("shoal.schedule.counts._FEW_RANKS", len(hosts))
    whole = count.__wrapped__(algorithm, hosts)
    assert max(host.sent for host in some.hosts) == max(host.sent for host in whole.hosts)


@pytest.mark.parametrize(
    ("n_hosts", "n_ranks"), [(5, 4), (8, 4), (4, 8), (6, 4), (8, 8), (16, 4), (16, 8)]
)
def test_no_all_reduce_is_promised_faster_than_the_nics_allow(n_hosts: int, n_ranks: int) -> None:
    cluster = default_cluster([host for host in range(n_hosts) for _ in range(n_ranks)])
    n_bytes = 256 << 20
    least_us = 2 * (n_hosts - 1) / n_hosts * n_bytes * cluster.wire.us_per_byte
    assert choose("all_reduce", n_bytes, cluster).cost_us >= least_us
