"""Every algorithm is proved to keep its contract: for sizes 1 to 17 and some above, in the soak for
all sizes to 64 and more above. The native tests run the same schedules on real numbers.
"""

import os
from collections.abc import Sequence

import pytest
from programs import EVERY

from shoal.analysis.prove.prover import prove, prove_steps
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
