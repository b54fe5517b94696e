"""Every algorithm takes the rounds and sends the bytes of its paper."""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

import pytest

from shoal.analysis.prove.prover import Expression, Proof, prove
from shoal.schedule import ALGORITHMS, Buffer, Place

SMALL = [1, 2, 3, 4, 5, 7, 8, 13, 16]
EVEN = ("direct", "sharded", "pairwise", "ring")


def ceil_log2(size: int) -> int:
    return next(k for k in range(size) if 2**k >= size)


def deepest(size: int) -> int:
    """Return the depth of a binomial tree. Where one rank sends its messages without waiting
    between them, only the depth remains of the paper's ceil(log2 n) rounds."""
    return max(place.bit_count() for place in range(size))


# The papers' figures, as functions of the size n: transfers one after another, and the share of
# the buffer (all blocks together) that each rank sends.
ROUNDS: Mapping[str, Callable[[int], int]] = {
    **dict.fromkeys(("broadcast direct", "reduce direct", "all_reduce direct"), lambda n: 1),
    **dict.fromkeys(("gather direct", "scatter direct", "all_to_all pairwise"), lambda n: 1),
    **dict.fromkeys(("all_gather direct", "reduce_scatter direct"), lambda n: 1),
    **dict.fromkeys(("all_reduce sharded", "all_reduce fairring"), lambda n: 2),
    **dict.fromkeys(("broadcast chain", "reduce chain"), lambda n: n - 1),
    **dict.fromkeys(("all_gather ring", "reduce_scatter ring"), lambda n: n - 1),
    **dict.fromkeys(("all_reduce ring", "all_reduce ring_2d"), lambda n: 2 * (n - 1)),
    **dict.fromkeys(("broadcast binomial", "reduce binomial", "gather binomial"), deepest),
    **dict.fromkeys(("scatter binomial", "all_gather bruck", "all_to_all bruck"), deepest),
    **dict.fromkeys(("all_reduce tree", "all_reduce halving"), lambda n: 2 * ceil_log2(n)),
    "all_reduce doubling": lambda n: ceil_log2(n) + (n & (n - 1) > 0),  # unless a power of two
    "broadcast scatter_gather": lambda n: n - 1,
    "reduce scatter_gather": lambda n: 2,
    "barrier dissemination": ceil_log2,
}
TWICE = [f"all_reduce {name}" for name in ("sharded", "ring", "ring_2d", "fairring")]
SENT_BY_EACH: Mapping[str, Callable[[int], Fraction]] = {
    **dict.fromkeys(TWICE, lambda n: 2 * Fraction(n - 1, n)),
    **dict.fromkeys(("all_gather direct", "all_gather bruck"), lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("reduce_scatter direct", "reduce_scatter ring"), lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("all_gather ring", "all_to_all pairwise"), lambda n: Fraction(n - 1, n)),
    "all_reduce direct": lambda n: Fraction(n - 1),
    "all_to_all bruck": lambda n: Fraction(sum(j.bit_count() for j in range(n)), n),
    "barrier dissemination": lambda n: Fraction(ceil_log2(n)),
}


@pytest.mark.parametrize("algorithm", ROUNDS)
def test_every_algorithm_takes_the_rounds_of_its_paper(algorithm: str) -> None:
    assert prove(*algorithm.split(), 1).rounds == 0
    for size in (2, 3, 4, 5, 8, 13):
        assert prove(*algorithm.split(), size).rounds == ROUNDS[algorithm](size)


@pytest.mark.parametrize("algorithm", SENT_BY_EACH)
def test_every_rank_sends_the_bytes_of_the_algorithms_paper(algorithm: str) -> None:
    for size in SMALL:
        wanted = dict.fromkeys(range(size), SENT_BY_EACH[algorithm](size))
        assert sent_by_rank(*algorithm.split(), size) == wanted


@pytest.mark.parametrize("algorithm", [k for k in SENT_BY_EACH if k.split()[1] in EVEN])
def test_all_links_carry_equal_bytes_and_rings_send_only_right(algorithm: str) -> None:
    collective, name = algorithm.split()
    for size in SMALL[1:]:
        sent = shares_sent(collective, name, size)
        links = {(a, b) for a in range(size) for b in range(size) if a != b}
        if name == "ring":
            links = {(rank, (rank + 1) % size) for rank in range(size)}
        assert set(sent) == links
        assert name == "ring" or len(set(sent.values())) == 1


@pytest.mark.parametrize("name", ["binomial", "chain", "direct"])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_every_rank_but_the_root_passes_the_buffer_once(collective: str, name: str) -> None:
    for size in SMALL:
        sent = prove(collective, name, size, root=size // 2).n_sent
        # The rank that receives the buffer in a broadcast, or sends it in a reduce.
        others = [to if collective == "broadcast" else source for source, to in sent]
        assert sorted(others) == [rank for rank in range(size) if rank != size // 2]
        assert set(sent.values()) <= {1}


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_binomial_trees_spare_the_root_links_but_no_blocks(collective: str) -> None:
    for size in SMALL:
        sent = prove(collective, "binomial", size).n_sent
        at_root = {ends: n for ends, n in sent.items() if 0 in ends}
        assert len(at_root) == ceil_log2(size)
        assert sum(at_root.values()) == size - 1


def test_a_scatter_gather_broadcast_takes_under_two_buffers_of_any_rank_and_a_reduce_one() -> None:
    for size in SMALL:
        root, *others = range(size)
        by_rank = sent_by_rank("broadcast", "scatter_gather", size)
        assert all(share < (2 if rank == root else 1.5) for rank, share in by_rank.items())
        by_rank = sent_by_rank("reduce", "scatter_gather", size)
        assert by_rank == {root: Fraction(size - 1, size), **dict.fromkeys(others, 1)}


def test_doubling_and_halving_send_the_bytes_of_their_papers_halving_most_to_neighbours() -> None:
    powers = [(size, size, 0) for size in (2, 4, 8, 16, 32)]
    for size, corners, pairs in (*powers, (3, 2, 1), (5, 4, 1), (6, 4, 2), (13, 8, 5)):
        doubling, halving = (sent_by_rank("all_reduce", n, size) for n in ("doubling", "halving"))
        for rank in range(size):
            is_extra, has_extra = (rank < 2 * pairs and rank % 2 == odd for odd in (1, 0))
            assert doubling[rank] == (1 if is_extra else ceil_log2(corners) + has_extra)
            whole = Fraction(2 * (corners - 1), corners)
            assert halving[rank] == (1 if is_extra else whole + has_extra)
    sent = shares_sent("all_reduce", "halving", 8)
    assert [sent[0, to] for to in (1, 2, 4)] == [1, Fraction(1, 2), Fraction(1, 4)]


def test_a_tree_sends_half_of_the_data_twice_up_and_twice_down() -> None:
    for size in (*SMALL, 128, 129):
        sent = shares_sent("all_reduce", "tree", size)
        assert max(sent_by_rank("all_reduce", "tree", size).values()) <= 2
        for rank in range(size):
            assert sum(share for (_, to), share in sent.items() if to == rank) <= 2


@pytest.mark.parametrize(
    ("collective", "name", "size", "holders", "order"),
    [
        ("all_reduce", "doubling", 6, range(6), (((0, 1), (2, 3)), (4, 5))),
        ("all_reduce", "direct", 4, range(4), (((0, 1), 2), 3)),
        ("reduce", "direct", 4, [2], (((2, 3), 0), 1)),  # from the root upwards
    ],
)
def test_folds_in_rank_order(
    collective: str, name: str, size: int, holders: Iterable[int], order: Expression
) -> None:
    proof = prove(collective, name, size, root=2 if collective == "reduce" else 0, window=0)
    for rank in holders:
        assert proof.expressions[rank, Place(Buffer.DATA, 0)] == order


def sent_by_rank(collective: str, name: str, size: int) -> dict[int, Fraction]:
    """Return the number of buffers that each rank sends."""
    sent = shares_sent(collective, name, size)
    return {
        rank: sum((share for (a, _), share in sent.items() if a == rank), Fraction(0))
        for rank in range(size)
    }


def shares_sent(collective: str, name: str, size: int) -> dict[tuple[int, int], Fraction]:
    """Return, by link, the part of the buffer that it carries."""
    proof: Proof = prove(collective, name, size)
    n_chunks = ALGORITHMS[collective][name].n_chunks(size)
    return {link: Fraction(n, n_chunks) for link, n in proof.n_sent.items()}
