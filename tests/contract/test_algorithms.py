"""Every algorithm is proved to keep its contract: for sizes 1 to 17 and some above, in the soak for
all sizes to 64 and more above. The native tests run the same schedules on real numbers.
"""

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from programs import EVERY

from shoal.analysis.prove.prover import Proof, prove, prove_steps
from shoal.errors import UsageError
from shoal.schedule import ALGORITHMS, MESSAGE, Buffer, Contract, Finish, Place, Value, find

# Without hosts, algorithms that use hosts equal others of this list; they have separate tests.
FLAT = [(c, name) for c, name in EVERY if not ALGORITHMS[c][name].by_host]
ROOTED = [(c, name) for c, name in EVERY if ALGORITHMS[c][name].rooted]
# Above 17: powers of two, their neighbours, and numbers with many and with few divisors.
BATCHES = [range(1, 17), (17, 24, 31, 32, 33), (47, 64)]
if os.environ.get("SHOAL_SOAK"):
    BATCHES = [range(n, n + 8) for n in range(1, 64, 8)] + [(n,) for n in (100, 127, 128, 129)]

every_flat_algorithm = pytest.mark.parametrize(("collective", "name"), FLAT)


@every_flat_algorithm
@pytest.mark.parametrize(
    "sizes", BATCHES, ids=lambda sizes: "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
)
def test_the_contract_holds_unstaged(collective: str, name: str, sizes: Sequence[int]) -> None:
    for size in sizes:
        prove(collective, name, size, n_segments=2 if size <= 16 else 1, window=0)


@every_flat_algorithm
def test_the_contract_holds_with_segments_staged_early(collective: str, name: str) -> None:
    for size in (1, 2, 3, 4, 5, 7, 8, 13, 16):
        prove(collective, name, size, n_segments=3, window=1)
        prove(collective, name, size, n_segments=3, window=2)


@pytest.mark.parametrize(("collective", "name"), ROOTED)
def test_the_contract_holds_for_every_root(collective: str, name: str) -> None:
    for size in range(1, 17):
        for root in range(size):
            prove(collective, name, size, root=root, n_segments=1, window=0)


@pytest.mark.parametrize("name", ["ring", "sharded", "tree", "halving"])
def test_the_owner_of_a_chunk_finishes_it(name: str) -> None:
    algorithm = find("all_reduce", name)
    assert algorithm.owner_rule
    for size in range(3, 34):
        owners = [algorithm.owner_rule(c, size) for c in range(algorithm.n_chunks(size))]
        for rank in range(size):
            own = [step.chunk for step in algorithm.steps(rank, size) if isinstance(step, Finish)]
            assert own == [chunk for chunk, owner in enumerate(owners) if owner == rank]


def test_send_matches_recv_between_any_two_ranks() -> None:
    data = Place(Buffer.DATA, 0)
    n_chunks, sent = {Buffer.DATA: 1}, {data: Value(range(2, 3), 0)}
    idle = Contract(n_chunks, precondition={}, postcondition={})
    contracts = [Contract(n_chunks, {}, sent), idle, Contract(n_chunks, sent, sent)]
    recv, send = (find(MESSAGE, half) for half in ("recv", "send"))
    schedule = [list(recv.steps(0, 3, 2)), [], list(send.steps(2, 3, 0))]
    assert prove_steps(schedule, contracts, window=0).n_sent == {(2, 0): 1}


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_rank_outside_the_group_is_refused(collective: str, name: str) -> None:
    algorithm = ALGORITHMS[collective][name]
    for rank, root in ((3, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(UsageError, match=r"must be in \[0, 3\)"):
            algorithm.steps(rank, 3, root)


# Hierarchical all-reduces keep the contract of an all-reduce for any placement of ranks.


PAIRS = ["ring/ring", "sharded/sharded", "sharded/ring", "ring/tree", "tree/doubling"]
PAIRS += ["halving/direct", "halving/halving", "tree/sharded"]
# Ranks of a host that are not adjacent.
SCATTERED = [(0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 0, 2, 1, 0, 0)]
SCATTERED.append((0, 0, 1, 2, 1, 2, 2, 3, 1, 0))

every_pair = pytest.mark.parametrize("pair", PAIRS)


def hosts_of(n_ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(host for host, n in enumerate(n_ranks) for _ in range(n))


def prove_on(name: str, hosts: tuple[int, ...], n_segments: int = 1, window: int = 0) -> Proof:
    return prove("all_reduce", name, len(hosts), hosts=hosts, n_segments=n_segments, window=window)


@every_pair
@pytest.mark.parametrize("n_hosts", range(1, 6 if os.environ.get("SHOAL_SOAK") else 5))
def test_the_contract_holds_on_every_mix_of_hosts(pair: str, n_hosts: int) -> None:
    for n_ranks in itertools.combinations_with_replacement(range(1, 5), n_hosts):
        prove_on(pair, hosts_of(n_ranks))


@every_pair
def test_the_contract_holds_in_any_order_of_hosts_with_segments_and_staging(pair: str) -> None:
    large_first = (hosts_of(n) for n in ((4, 1), (3, 2), (4, 3, 1), (2, 4, 1, 3), (4, 4, 1, 2, 3)))
    for hosts in (*large_first, *SCATTERED):
        prove_on(pair, hosts)
    for n_ranks in ((2, 2), (1, 3), (2, 3, 4)):
        prove_on(pair, hosts_of(n_ranks), n_segments=2)
        prove_on(pair, hosts_of(n_ranks), n_segments=3, window=2)


@every_pair
def test_with_one_host_or_one_rank_per_host_only_one_level_is_used(pair: str) -> None:
    whole, parts = find("all_reduce", pair), pair.split("/", 1)
    local, across = (find("all_reduce", part) for part in parts)
    for size in (2, 5, 8):
        for hosts, one in (((), local), ((0,) * size, local), (tuple(range(size)), across)):
            assert whole.n_chunks(size, hosts) == one.n_chunks(size)
            for rank in range(size):
                assert list(whole.steps(rank, size, 0, hosts)) == list(one.steps(rank, size))
                assert whole.scratch(rank, size, hosts) == one.scratch(rank, size)


@pytest.mark.parametrize(("n_hosts", "n_ranks"), [(2, 2), (4, 2), (3, 4), (8, 4)])
@pytest.mark.parametrize("name", ["ring_2d", "fairring"])
def test_equal_hosts_send_the_bytes_of_the_papers(name: str, n_hosts: int, n_ranks: int) -> None:
    hosts = hosts_of((n_ranks,) * n_hosts)
    n_chunks = find("all_reduce", name).n_chunks(len(hosts), hosts)
    inside, between = Counter[int](), Counter[int]()
    for (source, to), n in prove_on(name, hosts).n_sent.items():
        (inside if hosts[source] == hosts[to] else between)[source] += n
    for rank in range(len(hosts)):
        assert Fraction(inside[rank], n_chunks) == Fraction(2 * (n_ranks - 1), n_ranks)
        assert Fraction(between[rank], n_chunks) == Fraction(2 * (n_hosts - 1), n_hosts * n_ranks)


def test_rounds_are_the_sum_of_both_levels() -> None:
    hosts = hosts_of((4,) * 8)
    # 14 for the ring of 8 hosts, 6 for the ring of 4 ranks.
    assert prove_on("ring_2d", hosts).rounds == 14 + 6
    assert prove_on("fairring", hosts).rounds == 4
    # 2 log2 8 for the tree, 6 for the ring.
    assert prove_on("ring/tree", hosts).rounds == 6 + 6


@pytest.mark.parametrize("name", ["ring_2d", "fairring", "sharded/ring", "ring/tree"])
def test_local_rank_i_exchanges_with_local_rank_i_of_other_hosts(name: str) -> None:
    for hosts in (hosts_of((3, 3, 3)), (0, 1, 2, 0, 2, 1, 0, 1, 2)):
        place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        for source, to in prove_on(name, hosts).n_sent:
            assert hosts[source] == hosts[to] or place[source] == place[to]


def test_ranks_of_a_small_host_have_several_rails() -> None:
    # Four rails of two chunks: rank 4, first of the small host, has rails 0 and 2, rank 5 the rest.
    hosts = (0, 0, 0, 0, 1, 1)
    sent = prove_on("fairring", hosts).n_sent
    between = {ends: n for ends, n in sent.items() if hosts[ends[0]] != hosts[ends[1]]}
    pairs = [(0, 4), (1, 5), (2, 4), (3, 5)]
    assert between == {ends: 2 for a, b in pairs for ends in ((a, b), (b, a))}
