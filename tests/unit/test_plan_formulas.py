"""The formulas of the planner count what the schedules do: messages, passes over memory, cables.

The expected counts come from the steps themselves. A cluster on which only one thing costs anything
makes a formula say how often it counted that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from shoal.plan.cluster import Cluster, LinkCost
from shoal.plan.formulas import formula_of
from shoal.plan.site import site_of
from shoal.schedule import ALGORITHMS, Buffer, Copy, Finish, Recv, Send, find
from shoal.schedule.stripes import STRIPE_FLOOR_BYTES

# A multiple of every number of chunks that comes up, and less than a segment each.
N_BYTES = 2520 * 16
# So many that no scratch is kept from call to call.
MANY_BYTES = 2520 << 20


class Census(NamedTuple):
    """Of the rank with most messages to other hosts; of the busiest rank, host and cable."""

    near: float
    far: float
    passed: float
    host_passed: float
    cable: float


def blocks(n_hosts: int, here: int) -> tuple[int, ...]:
    return tuple(rank // here for rank in range(n_hosts * here))


def counted(collective: str, name: str, hosts: tuple[int, ...], n_bytes: int = N_BYTES) -> Census:
    """Count the steps of every rank."""
    size = len(hosts)
    algorithm = find(collective, name).fitted(n_bytes, size)
    n_chunks = algorithm.n_chunks(size, hosts)
    in_place = collective in ("all_reduce", "broadcast", "reduce", "barrier")
    chunk = n_bytes / n_chunks if in_place else n_bytes
    near, far, passed = Counter[int](), Counter[int](), Counter[int]()
    out, into = Counter[int](), Counter[int]()
    for rank in range(size):
        written: Counter[tuple[Buffer, int]] = Counter()
        read = set()
        for step in algorithm.steps(rank, size, 0, hosts):
            match step:
                case Copy():
                    passed[rank] += 1
                    written[step.into_buffer, step.into] += 1
                case Recv():
                    is_far = hosts[rank] != hosts[step.peer]
                    (far if is_far else near)[rank] += 1
                    passed[rank] += 1
                    into[hosts[rank]] += is_far
                    written[step.buffer, step.chunk] += 1
                case Send():
                    is_far = hosts[rank] != hosts[step.peer]
                    (far if is_far else near)[rank] += 1
                    out[hosts[rank]] += is_far
                    place = step.buffer, step.chunk
                    value = (*place, written[place])
                    # Peers on the host read one copy of a value; the kernel copies for each.
                    passed[rank] += is_far or value not in read
                    read |= set() if is_far else {value}
                case Finish():
                    pass
    busiest = max(range(size), key=lambda rank: (far[rank], near[rank]))
    by_host: Counter[int] = Counter()
    for rank, n in passed.items():
        by_host[hosts[rank]] += n
    return Census(
        near=near[busiest],
        far=far[busiest],
        passed=max(passed.values()) * chunk,
        host_passed=max(by_host.values()) * chunk,
        cable=max([*out.values(), *into.values(), 0]) * chunk,
    )


def claimed(collective: str, name: str, hosts: tuple[int, ...], n_bytes: int = N_BYTES) -> Census:
    """What the formula counts, one thing at a time."""

    def load(local: float = 0, wire: float = 0, memory: float = 0, cable: float = 0):  # type: ignore[no-untyped-def]
        cluster = Cluster(
            hosts=hosts,
            local=LinkCost(0.0, 0.0, local),
            wire=LinkCost(0.0, cable, wire),
            memory_us_per_byte=memory,
            n_cores=1,
        )
        formula = formula_of(collective, name)
        assert formula is not None
        return formula(n_bytes, site_of(cluster))

    return Census(
        near=load(local=1).rank,
        far=load(wire=1).rank,
        passed=load(memory=1).rank,
        host_passed=load(memory=1).host,
        cable=load(cable=1).wire,
    )


def scratch_counted(collective: str, name: str, hosts: tuple[int, ...]) -> float:
    """The bytes of scratch of the rank with most, for a call of `MANY_BYTES`."""
    size, algorithm = len(hosts), find(collective, name)
    in_place = collective in ("all_reduce", "broadcast", "reduce", "barrier")
    chunk = MANY_BYTES / (algorithm.n_chunks(size, hosts) if in_place else 1)
    return max(len(algorithm.scratch(rank, size, hosts)) for rank in range(size)) * chunk


def scratch_claimed(collective: str, name: str, hosts: tuple[int, ...]) -> float:
    """What the formula counts: the work where nothing but new memory costs anything."""
    free = LinkCost(0.0, 0.0, 0.0)
    cluster = Cluster(hosts, free, free, 0.0, n_cores=1, fresh_us_per_byte=1.0)
    formula = formula_of(collective, name)
    assert formula is not None
    return formula(MANY_BYTES, site_of(cluster)).rank


ALL = [
    (collective, name)
    for collective, names in ALGORITHMS.items()
    for name, algorithm in names.items()
    if not algorithm.by_host
]
HOSTS = [(0,) * 2, (0,) * 4, (0,) * 8, blocks(4, 1), blocks(8, 1), blocks(2, 4), blocks(4, 4)]


def shortest(name: str, hosts: tuple[int, ...]) -> int:
    """A length that every algorithm cuts as finely as it ever does, in chunks of one segment."""
    return len(hosts) * STRIPE_FLOOR_BYTES if name == "sharded" else N_BYTES


def assert_near(claim: Sequence[float], count: Sequence[float], within: float) -> None:
    for field, said, is_so in zip(Census._fields, claim, count, strict=True):
        assert is_so / within <= said <= is_so * within + 1e-9, (
            f"{field}: {said} claimed, {is_so} counted"
        )


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_a_formula_counts_what_the_steps_do(
    collective: str, name: str, hosts: tuple[int, ...]
) -> None:
    n_bytes = shortest(name, hosts)
    claim, count = (of(collective, name, hosts, n_bytes) for of in (claimed, counted))
    assert_near(claim, count, 1.5)


@pytest.mark.parametrize("hosts", [(0,) * 3, (0,) * 7, blocks(5, 1), blocks(3, 4)], ids=str)
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_other_sizes_than_powers_of_two_are_counted_within_a_factor(
    collective: str, name: str, hosts: tuple[int, ...]
) -> None:
    n_bytes = shortest(name, hosts)
    claim, count = (of(collective, name, hosts, n_bytes) for of in (claimed, counted))
    assert_near(claim, count, 2.1)


@pytest.mark.parametrize("name", ["ring_2d", "fairring", "sharded/ring", "sharded/halving"])
@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(4, 4), blocks(8, 2), blocks(3, 3)], ids=str)
def test_hierarchies_count_both_levels(name: str, hosts: tuple[int, ...]) -> None:
    assert_near(claimed("all_reduce", name, hosts), counted("all_reduce", name, hosts), 1.5)


@pytest.mark.parametrize("n_stripes", [4, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts", [(0,) * 8, blocks(8, 1), blocks(4, 4)], ids=str)
def test_fewer_reducers_are_counted(k: int, hosts: tuple[int, ...], n_stripes: int) -> None:
    name, n_bytes = f"sharded({k})", n_stripes * STRIPE_FLOOR_BYTES
    claim, count = (of("all_reduce", name, hosts, n_bytes) for of in (claimed, counted))
    assert_near(claim, count, 1.5)


@pytest.mark.parametrize("n_stripes", [2, 3, 4, 7])
@pytest.mark.parametrize("hosts", [(0,) * 8, blocks(8, 1), blocks(4, 4)], ids=str)
def test_fewer_stripes_of_a_short_buffer_are_counted(
    hosts: tuple[int, ...], n_stripes: int
) -> None:
    n_bytes = n_stripes * STRIPE_FLOOR_BYTES
    claim, count = (of("all_reduce", "sharded", hosts, n_bytes) for of in (claimed, counted))
    assert_near(claim, count, 1.5)


@pytest.mark.parametrize("k", [1, 3, 4, 8])
def test_scratch_of_fewer_reducers_is_counted(k: int) -> None:
    claim, count = (
        of("all_reduce", f"sharded({k})", (0,) * 8) for of in (scratch_claimed, scratch_counted)
    )
    assert claim == pytest.approx(count)


@pytest.mark.parametrize(
    "hosts", [*HOSTS, (0,) * 3, (0,) * 5, (0,) * 6, (0,) * 7, blocks(5, 1)], ids=str
)
@pytest.mark.parametrize(("collective", "name"), [one for one in ALL if one[0] != "barrier"])
def test_scratch_that_is_new_in_every_call_is_counted(
    collective: str, name: str, hosts: tuple[int, ...]
) -> None:
    claim, count = (of(collective, name, hosts) for of in (scratch_claimed, scratch_counted))
    assert claim == pytest.approx(count)


def test_scratch_that_the_allocator_keeps_is_not_counted() -> None:
    free = LinkCost(0.0, 0.0, 0.0)
    cluster = Cluster((0, 1), free, free, 0.0, n_cores=1, fresh_us_per_byte=1.0)
    formula = formula_of("all_reduce", "direct")
    assert formula is not None
    works = [formula(n, site_of(cluster)).work_us for n in (25 << 20, 32 << 20, 33 << 20)]
    assert works == [0, 0, 33 << 20]


@pytest.mark.parametrize(("name", "passes"), [("sharded", 2), ("ring", 2), ("direct", 4)])
def test_an_all_reduce_of_two_hosts_by_direct_passes_over_memory_twice_as_often(
    name: str, passes: int
) -> None:
    assert counted("all_reduce", name, (0, 1)).passed == passes * N_BYTES
    assert claimed("all_reduce", name, (0, 1)).passed == passes * N_BYTES
