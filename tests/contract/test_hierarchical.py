"""Hierarchical all-reduces keep the contract of an all-reduce, however the ranks lie on hosts."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from shoal.analysis.prove.prover import Proof, prove
from shoal.errors import UsageError
from shoal.schedule import ALGORITHMS, Send, find
from shoal.schedule.hierarchical import hierarchical

PAIRS = [
    "ring/ring",
    "sharded/sharded",
    "sharded/ring",
    "ring/tree",
    "tree/doubling",
    "halving/direct",
    "halving/halving",
    "tree/sharded",
]
# Ranks of a host that are not next to one another.
SCATTERED = [
    (0, 1, 0, 1),
    (0, 1, 2, 0, 1, 2),
    (0, 1, 0, 2, 1, 0, 0),
    (0, 0, 1, 2, 1, 2, 2, 3, 1, 0),
]

every_pair = pytest.mark.parametrize("pair", PAIRS)


def mixes(n_hosts: int) -> Iterator[tuple[int, ...]]:
    """The hosts of the ranks, for every mix of so many hosts with 1 to 4 ranks."""
    for n_ranks in itertools.combinations_with_replacement(range(1, 5), n_hosts):
        yield hosts_of(n_ranks)


def hosts_of(n_ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(host for host, n in enumerate(n_ranks) for _ in range(n))


def prove_on(name: str, hosts: tuple[int, ...], n_segments: int = 1, window: int = 0) -> Proof:
    return prove("all_reduce", name, len(hosts), hosts=hosts, n_segments=n_segments, window=window)


@every_pair
@pytest.mark.parametrize("n_hosts", range(1, 6 if os.environ.get("SHOAL_SOAK") else 5))
def test_keeps_its_promise_on_every_mix_of_hosts(pair: str, n_hosts: int) -> None:
    for hosts in mixes(n_hosts):
        prove_on(pair, hosts)


@every_pair
def test_keeps_its_promise_where_large_hosts_come_first(pair: str) -> None:
    for n_ranks in ((4, 1), (3, 2), (4, 3, 1), (2, 4, 1, 3), (4, 4, 1, 2, 3)):
        prove_on(pair, hosts_of(n_ranks))


@every_pair
def test_keeps_its_promise_with_several_segments_and_staging(pair: str) -> None:
    for n_ranks in ((2, 2), (1, 3), (2, 3, 4)):
        prove_on(pair, hosts_of(n_ranks), n_segments=2)
        prove_on(pair, hosts_of(n_ranks), n_segments=3, window=2)


@every_pair
@pytest.mark.parametrize("hosts", SCATTERED)
def test_ranks_of_a_host_need_not_be_neighbours(pair: str, hosts: tuple[int, ...]) -> None:
    prove_on(pair, hosts)


def test_a_few_reducers_can_be_chosen_on_both_levels() -> None:
    for name in ("sharded(2)/ring", "ring/sharded(2)", "sharded(2)/sharded(3)"):
        for n_ranks in ((2, 2, 2), (4, 3, 2), (2, 3, 4, 4)):
            prove_on(name, hosts_of(n_ranks))


@every_pair
def test_on_one_host_it_is_the_local_algorithm_alone(pair: str) -> None:
    whole, local = find("all_reduce", pair), find("all_reduce", pair.split("/", 1)[0])
    for size in (1, 2, 5, 8):
        for hosts in ((), (0,) * size):
            assert whole.n_chunks(size, hosts) == local.n_chunks(size)
            for rank in range(size):
                assert list(whole.steps(rank, size, 0, hosts)) == list(local.steps(rank, size))
                assert whole.scratch(rank, size, hosts) == local.scratch(rank, size)


@every_pair
def test_with_a_host_for_each_rank_it_is_the_algorithm_across_alone(pair: str) -> None:
    whole, across = find("all_reduce", pair), find("all_reduce", pair.split("/")[1])
    for size in (2, 5, 8):
        hosts = tuple(range(size))
        assert whole.n_chunks(size, hosts) == across.n_chunks(size)
        for rank in range(size):
            assert list(whole.steps(rank, size, 0, hosts)) == list(across.steps(rank, size))
            assert whole.scratch(rank, size, hosts) == across.scratch(rank, size)


@pytest.mark.parametrize(("n_hosts", "n_ranks"), [(2, 2), (4, 2), (3, 4), (8, 4)])
@pytest.mark.parametrize("name", ["ring_2d", "fairring"])
def test_equal_hosts_send_what_the_papers_say(name: str, n_hosts: int, n_ranks: int) -> None:
    hosts = hosts_of((n_ranks,) * n_hosts)
    n_chunks = find("all_reduce", name).n_chunks(len(hosts), hosts)
    inside, between = Counter[int](), Counter[int]()
    for (source, to), n in prove_on(name, hosts).n_sent.items():
        (inside if hosts[source] == hosts[to] else between)[source] += n
    for rank in range(len(hosts)):
        assert Fraction(inside[rank], n_chunks) == Fraction(2 * (n_ranks - 1), n_ranks)
        assert Fraction(between[rank], n_chunks) == Fraction(2 * (n_hosts - 1), n_hosts * n_ranks)


def test_rounds_are_those_of_both_levels() -> None:
    hosts = hosts_of((4,) * 8)
    # 14 for the ring of 8 hosts, 6 for that of 4 ranks.
    assert prove_on("ring_2d", hosts).rounds == 14 + 6
    assert prove_on("fairring", hosts).rounds == 4
    # 2 log2 8 for the tree, 6 for the ring.
    assert prove_on("ring/tree", hosts).rounds == 6 + 6


@pytest.mark.parametrize("name", ["ring_2d", "fairring", "sharded/ring", "ring/tree"])
def test_local_rank_i_talks_to_local_rank_i_of_other_hosts(name: str) -> None:
    for hosts in (hosts_of((3, 3, 3)), (0, 1, 2, 0, 2, 1, 0, 1, 2)):
        place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        for source, to in prove_on(name, hosts).n_sent:
            assert hosts[source] == hosts[to] or place[source] == place[to]


def test_ranks_of_a_small_host_have_several_rails() -> None:
    # Four rails of two chunks: rank 4, the first of the small host, has 0 and 2, rank 5 the others.
    hosts = (0, 0, 0, 0, 1, 1)
    sent = prove_on("fairring", hosts).n_sent
    between = {ends: n for ends, n in sent.items() if hosts[ends[0]] != hosts[ends[1]]}
    pairs = [(0, 4), (1, 5), (2, 4), (3, 5)]
    assert between == {ends: 2 for a, b in pairs for ends in ((a, b), (b, a))}


@pytest.mark.parametrize("local", ["direct", "doubling", "ring_2d", "rings", ""])
def test_what_cannot_run_inside_a_host_is_refused_with_what_can(local: str) -> None:
    whole = f"{local}/ring"
    can = [name for name, one in ALGORITHMS["all_reduce"].items() if one.owner_rule is not None]
    with pytest.raises(UsageError, match=rf"{whole!r}.* {', '.join(can)} and sharded"):
        find("all_reduce", whole)


@pytest.mark.parametrize("across", ["fairring", "rings", "", "ring/ring"])
def test_what_cannot_run_between_hosts_is_refused_with_what_can(across: str) -> None:
    with pytest.raises(UsageError, match=r"direct, sharded, ring, .* and sharded\(k\) can"):
        find("all_reduce", f"ring/{across}")


def test_only_all_reduces_that_are_finished_by_one_rank_can_be_cut_in_two() -> None:
    known = ALGORITHMS["all_reduce"]
    for local, across in (("direct", "ring"), ("ring_2d", "ring"), ("ring", "ring_2d")):
        with pytest.raises(UsageError, match="one rank alone must finish"):
            hierarchical(known[local], known[across])


def test_a_host_with_fewer_ranks_than_reducers_is_refused_before_the_first_step() -> None:
    with pytest.raises(UsageError, match=r"sharded\(3\): 3 reducers .* 2 ranks"):
        find("all_reduce", "sharded(3)/ring").steps(0, 5, 0, (0, 0, 0, 1, 1))


def test_a_rank_of_2048_takes_only_its_own_steps() -> None:
    hosts = hosts_of((8,) * 256)
    steps = list(find("all_reduce", "ring_2d").steps(7, 2048, 0, hosts))
    # The ring of 2,048 takes as many.
    assert sum(isinstance(step, Send) for step in steps) == 2 * 2047
