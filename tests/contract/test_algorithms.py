"""Every algorithm, for every size from 1 to 64, is proved to keep its collective's promise."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.lens.prove import Proof, prove, prove_steps
from shoal.schedule import (
    ALGORITHMS,
    Buffer,
    Copy,
    Finish,
    Place,
    Promise,
    Send,
    Step,
    Value,
    promise,
)

WHOLE_GROUP = [(c, name) for c in ALGORITHMS if c != "send_recv" for name in ALGORITHMS[c]]
# Without hosts, those that go by host are others of this list; they have tests of their own.
FLAT = [(c, name) for c, name in WHOLE_GROUP if not ALGORITHMS[c][name].by_host]
ROOTED = [(c, name) for c, name in WHOLE_GROUP if ALGORITHMS[c][name].rooted]
BATCHES = [range(1, 17), range(17, 33), range(33, 49), range(49, 65), (100, 127, 128, 129)]
SMALL = [1, 2, 3, 4, 5, 7, 8, 13, 16]

every_algorithm = pytest.mark.parametrize(("collective", "name"), WHOLE_GROUP)
every_flat_algorithm = pytest.mark.parametrize(("collective", "name"), FLAT)


@every_flat_algorithm
@pytest.mark.parametrize("sizes", BATCHES, ids=lambda sizes: f"{sizes[0]}-{sizes[-1]}")
def test_keeps_its_promise_without_any_staging_memory(
    collective: str, name: str, sizes: Sequence[int]
) -> None:
    for size in sizes:
        prove(collective, name, size, n_segments=2 if size <= 16 else 1, window=0)


@every_flat_algorithm
def test_keeps_its_promise_with_segments_staged_early(collective: str, name: str) -> None:
    for size in SMALL:
        prove(collective, name, size, n_segments=3, window=1)
        prove(collective, name, size, n_segments=3, window=2)


@pytest.mark.parametrize(("collective", "name"), ROOTED)
def test_keeps_its_promise_for_every_root(collective: str, name: str) -> None:
    for size in range(1, 17):
        for root in range(size):
            prove(collective, name, size, root=root, n_segments=1, window=0)


def ceil_log2(size: int) -> int:
    return next(k for k in range(size) if 2**k >= size)


def deepest(size: int) -> int:
    """The depth of a binomial tree. Where one rank's messages follow one another, and do not wait
    for one another, that is all that counts of the paper's ceil(log2 n) rounds."""
    return max(place.bit_count() for place in range(size))


def unless_power_of_two(size: int, n: int) -> int:
    return 0 if 2 ** ceil_log2(size) == size else n


# The papers' figures, as functions of the size n: transfers one after another, and the share of
# the whole buffer (all blocks together) that each rank sends.
ROUNDS: Mapping[tuple[str, str], Callable[[int], int]] = {
    ("all_reduce", "direct"): lambda n: 1,
    ("all_reduce", "sharded"): lambda n: 2,
    ("all_reduce", "ring"): lambda n: 2 * (n - 1),
    ("all_reduce", "tree"): lambda n: 2 * ceil_log2(n),
    ("all_reduce", "doubling"): lambda n: ceil_log2(n) + unless_power_of_two(n, 1),
    ("all_reduce", "halving"): lambda n: 2 * ceil_log2(n),
    ("all_reduce", "ring_2d"): lambda n: 2 * (n - 1),
    ("all_reduce", "fairring"): lambda n: 2,
    ("broadcast", "direct"): lambda n: 1,
    ("broadcast", "binomial"): deepest,
    ("broadcast", "scatter_gather"): lambda n: n - 1,
    ("reduce", "binomial"): deepest,
    ("reduce", "chain"): lambda n: n - 1,
    ("reduce", "scatter_gather"): lambda n: 2,
    ("gather", "binomial"): deepest,
    ("scatter", "binomial"): deepest,
    ("all_gather", "bruck"): deepest,
    ("all_to_all", "bruck"): deepest,
    ("broadcast", "chain"): lambda n: n - 1,
    ("all_gather", "direct"): lambda n: 1,
    ("all_gather", "ring"): lambda n: n - 1,
    ("reduce_scatter", "direct"): lambda n: 1,
    ("reduce_scatter", "ring"): lambda n: n - 1,
    ("reduce", "direct"): lambda n: 1,
    ("gather", "direct"): lambda n: 1,
    ("scatter", "direct"): lambda n: 1,
    ("all_to_all", "pairwise"): lambda n: 1,
    ("barrier", "dissemination"): ceil_log2,
}
SENT_BY_EACH: Mapping[tuple[str, str], Callable[[int], Fraction]] = {
    ("all_reduce", "direct"): lambda n: Fraction(n - 1),
    ("all_reduce", "sharded"): lambda n: Fraction(2 * (n - 1), n),
    ("all_reduce", "ring"): lambda n: Fraction(2 * (n - 1), n),
    ("all_reduce", "ring_2d"): lambda n: Fraction(2 * (n - 1), n),
    ("all_reduce", "fairring"): lambda n: Fraction(2 * (n - 1), n),
    ("all_gather", "direct"): lambda n: Fraction(n - 1, n),
    ("all_gather", "bruck"): lambda n: Fraction(n - 1, n),
    ("all_gather", "ring"): lambda n: Fraction(n - 1, n),
    ("reduce_scatter", "direct"): lambda n: Fraction(n - 1, n),
    ("reduce_scatter", "ring"): lambda n: Fraction(n - 1, n),
    ("all_to_all", "pairwise"): lambda n: Fraction(n - 1, n),
    ("all_to_all", "bruck"): lambda n: Fraction(sum(j.bit_count() for j in range(n)), n),
    ("barrier", "dissemination"): lambda n: Fraction(ceil_log2(n)),
}


@every_algorithm
def test_takes_as_many_rounds_as_its_paper_says(collective: str, name: str) -> None:
    assert prove(collective, name, 1).rounds == 0
    for size in (2, 3, 4, 5, 8, 13):
        assert prove(collective, name, size).rounds == ROUNDS[collective, name](size)


@pytest.mark.parametrize(("collective", "name"), SENT_BY_EACH)
def test_each_rank_sends_as_much_as_its_paper_says(collective: str, name: str) -> None:
    for size in SMALL:
        sent = shares_sent(collective, name, size)
        for rank in range(size):
            by_rank = sum(share for (source, _), share in sent.items() if source == rank)
            assert by_rank == SENT_BY_EACH[collective, name](size)


@pytest.mark.parametrize(
    ("collective", "name"), [k for k in SENT_BY_EACH if k[1] in ("direct", "sharded", "pairwise")]
)
def test_direct_sharded_and_pairwise_load_all_links_alike(collective: str, name: str) -> None:
    for size in SMALL:
        sent = shares_sent(collective, name, size)
        everyone = {(a, b) for a in range(size) for b in range(size) if a != b}
        assert set(sent) == everyone
        assert len(set(sent.values())) <= 1


@pytest.mark.parametrize(("collective", "name"), [k for k in SENT_BY_EACH if k[1] == "ring"])
def test_rings_send_only_to_the_right(collective: str, name: str) -> None:
    for size in SMALL[1:]:
        assert set(shares_sent(collective, name, size)) == {
            (rank, (rank + 1) % size) for rank in range(size)
        }


def test_broadcast_sends_the_buffer_once_to_everyone_but_the_root() -> None:
    for size in SMALL:
        direct, chain = (
            prove("broadcast", name, size, root=size - 1) for name in ("direct", "chain")
        )
        assert direct.n_sent == {(size - 1, rank): 1 for rank in range(size - 1)}
        assert chain.n_sent == {((rank - 1) % size, rank): 1 for rank in range(size - 1)}


@pytest.mark.parametrize(
    ("collective", "outward"), [("reduce", False), ("gather", False), ("scatter", True)]
)
def test_direct_sends_each_block_once_between_the_root_and_each_other_rank(
    collective: str, outward: bool
) -> None:
    for size in SMALL:
        sent = prove(collective, "direct", size, root=size - 1).n_sent
        others = range(size - 1)
        assert sent == {(size - 1, r) if outward else (r, size - 1): 1 for r in others}


def test_direct_reduce_folds_from_the_root_upwards() -> None:
    proof = prove("reduce", "direct", 4, root=2)
    assert proof.expressions[2, Place(Buffer.DATA, 0)] == (((2, 3), 0), 1)


def test_direct_all_reduce_folds_in_rank_order() -> None:
    proof = prove("all_reduce", "direct", 4)
    for rank in range(4):
        assert proof.expressions[rank, Place(Buffer.DATA, 0)] == (((0, 1), 2), 3)


def test_send_meets_recv_between_any_two_ranks() -> None:
    halves, data = ALGORITHMS["send_recv"], Place(Buffer.DATA, 0)
    n_chunks, sent = {Buffer.DATA: 1}, {data: Value(range(2, 3), 0)}
    idle = Promise(n_chunks, starts={}, ends={})
    promises = [Promise(n_chunks, {}, sent), idle, Promise(n_chunks, sent, sent)]
    schedule = [list(halves["recv"].steps(0, 3, 2)), [], list(halves["send"].steps(2, 3, 0))]
    assert prove_steps(schedule, promises, window=0).n_sent == {(2, 0): 1}


@every_algorithm
def test_refuses_a_rank_that_is_not_in_the_group(collective: str, name: str) -> None:
    algorithm = ALGORITHMS[collective][name]
    for rank, root in ((3, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(UsageError, match=r"must be in \[0, 3\)"):
            algorithm.steps(rank, 3, root)


# A second interpreter, which shares nothing with the prover: it goes through each rank's steps one
# by one, and every link takes as much as is sent.


@every_algorithm
@pytest.mark.parametrize("size", SMALL)
def test_numbers_come_out_as_numpy_computes_them(collective: str, name: str, size: int) -> None:
    algorithm, root, length = ALGORITHMS[collective][name], size // 2, 3
    n_chunks = max(size, algorithm.n_chunks(size))
    own = np.random.default_rng(size).integers(-100, 100, (size, n_chunks, length))
    held: list[dict[tuple[int, int], np.ndarray]] = []
    for rank in range(size):
        starts = promise(collective, rank, size, algorithm.n_chunks(size), root).starts
        held.append({place: own[rank, place.chunk] for place in starts})
    go_through([deque(algorithm.steps(rank, size, root)) for rank in range(size)], held)
    for rank in range(size):
        for place, numbers in wanted(collective, own, rank, root, algorithm.n_chunks(size)):
            np.testing.assert_array_equal(held[rank][place], numbers)


def wanted(
    collective: str, own: np.ndarray, rank: int, root: int, n_chunks: int
) -> list[tuple[tuple[int, int], np.ndarray]]:
    """What `rank` ends with, where own[r, c] is chunk c of what rank r brings."""
    mean, is_root = own.sum(axis=0) / len(own), rank == root
    data = {
        "all_reduce": mean[:n_chunks],
        "broadcast": own[root, :n_chunks],
        "reduce": (mean if is_root else own[rank])[:n_chunks],
        "barrier": [],  # It leaves nothing that numbers could show.
    }
    output = {
        "all_gather": own[:, 0],
        "reduce_scatter": mean[[rank]],
        "gather": own[:, 0] if is_root else [],
        "scatter": own[root, [rank]],
        "all_to_all": own[:, rank],
    }
    buffer = Buffer.DATA if collective in data else Buffer.OUTPUT
    return [((buffer, c), chunk) for c, chunk in enumerate({**data, **output}[collective])]


def go_through(schedule: list[deque[Step]], held: list[dict[tuple[int, int], np.ndarray]]) -> None:
    """Average: Finish divides by the number of ranks."""
    wire: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    while any(schedule):
        before = sum(map(len, schedule))
        for rank, steps in enumerate(schedule):
            while steps and do_one(rank, steps[0], held[rank], wire, len(schedule)):
                steps.popleft()
        assert sum(map(len, schedule)) < before, "no rank can go on"
    assert not any(wire.values())


def do_one(
    rank: int,
    step: Step,
    held: dict[tuple[int, int], np.ndarray],
    wire: dict[tuple[int, int], deque[np.ndarray]],
    size: int,
) -> bool:
    """False if the step has to wait for its peer."""
    place = (step.buffer, step.chunk)
    if isinstance(step, Send):
        wire[rank, step.peer].append(held[place])
    elif isinstance(step, Finish):
        held[place] = held[place] / size
    elif isinstance(step, Copy):
        into = (step.into_buffer, step.into)
        held[into] = held[into] + held[place] if step.fold else held[place]
    elif not wire[step.peer, rank]:
        return False
    else:
        got = wire[step.peer, rank].popleft()
        held[place] = held[place] + got if step.fold else got
    return True


def shares_sent(collective: str, name: str, size: int) -> dict[tuple[int, int], Fraction]:
    """By link: the part of the whole buffer that it carries."""
    proof: Proof = prove(collective, name, size)
    n_chunks = ALGORITHMS[collective][name].n_chunks(size)
    return {link: Fraction(n, n_chunks) for link, n in proof.n_sent.items()}
