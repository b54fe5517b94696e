"""Every algorithm is proved to keep its contract: for sizes 1 to 32 and some above, in the soak for
all sizes to 64 and more above.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import pytest

from shoal.analysis.prove.prover import prove, prove_steps
from shoal.errors import UsageError
from shoal.schedule import (
    ALGORITHMS,
    MESSAGE,
    Buffer,
    Contract,
    Copy,
    Finish,
    Place,
    Send,
    Step,
    Value,
    contract_of,
    find,
)

WHOLE_GROUP = [(c, name) for c in ALGORITHMS for name in ALGORITHMS[c]]
# Without hosts, those that go by host are others of this list; they have tests of their own.
FLAT = [(c, name) for c, name in WHOLE_GROUP if not ALGORITHMS[c][name].by_host]
ROOTED = [(c, name) for c, name in WHOLE_GROUP if ALGORITHMS[c][name].rooted]
# Each of a few seconds at most, also on a busy machine. Above 32: powers of two, their neighbours,
# and numbers with many and with few divisors.
BATCHES = [range(1, 17), range(17, 33), (33, 36), (47, 48), (63, 64), (129,)]
if os.environ.get("SHOAL_SOAK"):
    BATCHES = [range(n, n + 8) for n in range(1, 64, 8)] + [(n,) for n in (100, 127, 128, 129)]
SMALL = [1, 2, 3, 4, 5, 7, 8, 13, 16]

every_algorithm = pytest.mark.parametrize(("collective", "name"), WHOLE_GROUP)
every_flat_algorithm = pytest.mark.parametrize(("collective", "name"), FLAT)


@every_flat_algorithm
@pytest.mark.parametrize(
    "sizes", BATCHES, ids=lambda sizes: "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
)
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


# Sharded among fewer reducers than there are ranks.


@pytest.mark.parametrize("n_reducers", [1, 2, 3, 4, 8, 16])
def test_any_number_of_reducers_keeps_the_promise(n_reducers: int) -> None:
    algorithm = find("all_reduce", f"sharded({n_reducers})")
    for size in [n for n in (*SMALL, 33, 64) if n >= n_reducers]:
        proof = prove("all_reduce", algorithm, size, window=0)
        assert proof.rounds == (2 if size > 1 else 0)


def test_as_many_reducers_as_ranks_are_the_sharded_all_reduce() -> None:
    for size in SMALL:
        few, all_of_them = (find("all_reduce", name) for name in (f"sharded({size})", "sharded"))
        for rank in range(size):
            assert list(few.steps(rank, size)) == list(all_of_them.steps(rank, size))


def test_more_reducers_than_ranks_are_refused_before_the_first_step() -> None:
    algorithm = find("all_reduce", "sharded(9)")
    for ask in (lambda: algorithm.steps(0, 4), lambda: algorithm.n_chunks(4)):
        with pytest.raises(UsageError, match=r"9 reducers are too many for 4 ranks.*sharded\(4\)"):
            ask()


@pytest.mark.parametrize("name", ["ring", "sharded", "sharded(1)", "sharded(3)", "tree", "halving"])
def test_the_owner_of_a_chunk_is_who_finishes_it(name: str) -> None:
    algorithm = find("all_reduce", name)
    assert algorithm.owner_rule
    for size in range(3, 34):
        owners = [algorithm.owner_rule(c, size) for c in range(algorithm.n_chunks(size))]
        for rank in range(size):
            own = [step.chunk for step in algorithm.steps(rank, size) if isinstance(step, Finish)]
            assert own == [chunk for chunk, owner in enumerate(owners) if owner == rank]


def test_send_meets_recv_between_any_two_ranks() -> None:
    data = Place(Buffer.DATA, 0)
    n_chunks, sent = {Buffer.DATA: 1}, {data: Value(range(2, 3), 0)}
    idle = Contract(n_chunks, precondition={}, postcondition={})
    contracts = [Contract(n_chunks, {}, sent), idle, Contract(n_chunks, sent, sent)]
    recv, send = (find(MESSAGE, half) for half in ("recv", "send"))
    schedule = [list(recv.steps(0, 3, 2)), [], list(send.steps(2, 3, 0))]
    assert prove_steps(schedule, contracts, window=0).n_sent == {(2, 0): 1}


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
    contracts: list[Contract] = []
    for rank in range(size):
        contracts.append(contract_of(collective, rank, size, algorithm.n_chunks(size), root))
        held.append({place: own[rank, place.chunk] for place in contracts[-1].precondition})
    go_through([deque(algorithm.steps(rank, size, root)) for rank in range(size)], held)
    for contract, holds in zip(contracts, held, strict=True):
        # What was folded in twice leaves nothing that sums could show.
        for place, value in contract.postcondition.items() if not contract.idempotent else ():
            total = own[value.ranks, value.chunk].sum(axis=0)
            np.testing.assert_array_equal(holds[place], total / size if value.finished else total)


@pytest.mark.parametrize("name", ["ring_2d", "fairring", "halving/doubling", "tree/direct"])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 1, 2, 1, 1, 2, 1)])
def test_numbers_come_out_across_hosts(name: str, hosts: tuple[int, ...]) -> None:
    algorithm, size = find("all_reduce", name), len(hosts)
    n_chunks = algorithm.n_chunks(size, hosts)
    own = np.random.default_rng(size).integers(-100, 100, (size, n_chunks, 3))
    held = [{(Buffer.DATA, c): own[rank, c] for c in range(n_chunks)} for rank in range(size)]
    go_through([deque(algorithm.steps(rank, size, 0, hosts)) for rank in range(size)], held)
    for rank in range(size):
        for chunk in range(n_chunks):
            mean = own[:, chunk].sum(axis=0) / size
            np.testing.assert_array_equal(held[rank][Buffer.DATA, chunk], mean)


def go_through(
    schedule: list[deque[Step]],
    held: list[dict[tuple[int, int], np.ndarray]],
    *,
    divide: bool = True,
) -> None:
    """Average: Finish divides by the number of ranks. Or sum: it does nothing."""
    wire: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    divisor = len(schedule) if divide else 1
    while any(schedule):
        before = sum(map(len, schedule))
        for rank, steps in enumerate(schedule):
            while steps and do_one(rank, steps[0], held[rank], wire, divisor):
                steps.popleft()
        assert sum(map(len, schedule)) < before, "no rank can go on"
    assert not any(wire.values())


def do_one(
    rank: int,
    step: Step,
    held: dict[tuple[int, int], np.ndarray],
    wire: dict[tuple[int, int], deque[np.ndarray]],
    divisor: int,
) -> bool:
    """False if the step has to wait for its peer."""
    place = (step.buffer, step.chunk)
    if isinstance(step, Send):
        wire[rank, step.peer].append(held[place])
    elif isinstance(step, Finish):
        held[place] = held[place] / divisor if divisor > 1 else held[place]
    elif isinstance(step, Copy):
        into = (step.into_buffer, step.into)
        held[into] = held[into] + held[place] if step.fold else held[place]
    elif not wire[step.peer, rank]:
        return False
    else:
        got = wire[step.peer, rank].popleft()
        held[place] = held[place] + got if step.fold else got
    return True
