"""The prover refuses wrong schedules, and names the rank and its wrong step."""

from collections.abc import Iterator

import pytest
from programs import EVERY

from shoal.analysis.prove.prover import prove, prove_steps
from shoal.errors import ProofError, UsageError
from shoal.schedule import ALGORITHMS, Algorithm, chains
from shoal.schedule.collectives import Contract, contract_of
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def prove_with(collective: str, name: str, size: int, rank: int, at: slice, to: list[Step]) -> None:
    """Prove an algorithm in which `rank` makes other steps in place of those at `at`."""
    algorithm = ALGORITHMS[collective][name]
    schedule = [list(algorithm.steps(r, size)) for r in range(size)]
    schedule[rank][at] = to
    contracts = [contract_of(collective, r, size, algorithm.n_chunks(size)) for r in range(size)]
    scratch = [algorithm.scratch(r, size) for r in range(size)]
    prove_steps(schedule, contracts, scratch=scratch, window=0)


@pytest.mark.parametrize(("collective", "name"), EVERY)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_step_of_an_algorithm_is_needed(collective: str, name: str, size: int) -> None:
    for rank in range(size):
        for at, step in enumerate(ALGORITHMS[collective][name].steps(rank, size)):
            with pytest.raises(ProofError):
                prove_with(collective, name, size, rank, slice(at, at + 1), [])
            prove_with(collective, name, size, rank, slice(at, at + 1), [step])


FINISHED_FIRST = [Finish(0), Recv(1, 0, fold=True)]
FOLDED_TWICE = [Copy(0, 0), Copy(0, 0, fold=True)]
BY_ANOTHERS_PLACE = [Recv(2, 1, buffer=OUTPUT), Copy(1, 2, OUTPUT, OUTPUT)]
BY_ANOTHERS_PLACE.append(Recv(1, 1, buffer=OUTPUT))
CROSSED = Copy(1, 0, into_buffer=Buffer.DATA)
CROSSED_FOLD = Copy(1, 0, into_buffer=Buffer.DATA, fold=True)
FOLD_OVER_NOTHING = Copy(0, 0, INPUT, OUTPUT, fold=True)
# An algorithm and its size; replaced steps of rank 0 and the new ones; the place and the reason.
RULES = [
    # The value in a place.
    ("all_reduce ring 3", 4, 5, [], "DATA[1]", "never finished"),
    ("all_reduce ring 3", 4, 4, [Finish(1)], "step 5 (finish DATA[1])", "again"),
    ("broadcast direct 1", 0, 0, [Finish(0)], "DATA[0]", "should not be finished"),
    ("all_reduce sharded 2", 1, 3, FINISHED_FIRST, "step 2", "folded after Finish"),
    ("all_reduce direct 2", 1, 2, FOLDED_TWICE, "step 2", "into chunk 0 of rank 0: rank 0 twice"),
    ("all_reduce sharded 2", 1, 2, [Recv(1, 0)], "DATA[0]", "of rank 1, finished, not chunk 0"),
    ("all_reduce ring 2", 0, 0, [CROSSED_FOLD], "step 0", "they are different chunks"),
    ("all_reduce ring 2", 0, 0, [CROSSED], "step 0", "chunk 1 of rank 0 may not fit"),
    ("all_gather direct 3", 3, 5, BY_ANOTHERS_PLACE, "step 3", "chunk 0 of rank 2 may not fit"),
    ("barrier dissemination 3", 5, 6, [], "DATA[0]", "not chunk 0 of rank 0, 1, 2"),
    # Places that a step may not touch.
    ("all_reduce ring 2", 0, 0, [Finish(2)], "step 0", "there is no such chunk"),
    ("all_reduce ring 2", 0, 0, [Finish(0, OUTPUT)], "step 0", "there is no such chunk"),
    ("all_reduce ring 2", 0, 0, [Copy(0, into=0)], "step 0", "there is no such chunk"),
    ("all_reduce ring 2", 0, 0, [Copy(5, into=0)], "step 0", "there is no such chunk"),
    ("reduce_scatter ring 4", 0, 0, [Copy(0, 0, OUTPUT)], "step 0", "nothing was ever written"),
    ("reduce_scatter ring 4", 0, 0, [Finish(0, OUTPUT)], "step 0", "nothing was ever written"),
    ("reduce_scatter ring 4", 0, 0, [FOLD_OVER_NOTHING], "step 0", "nothing was ever written"),
    ("reduce_scatter ring 2", 2, 3, [Recv(1, 1, buffer=INPUT)], "step 2", "writes INPUT"),
    ("reduce_scatter ring 2", 2, 3, [Recv(1, 1, True, INPUT)], "step 2", "writes INPUT"),
    ("reduce_scatter ring 4", 0, 0, [Copy(1, 0, INPUT, INPUT)], "step 0", "writes INPUT"),
    ("reduce_scatter ring 4", 0, 0, [Finish(1, INPUT)], "step 0", "writes INPUT"),
    ("all_gather ring 1", 0, 1, [], "OUTPUT[0]", "nothing was ever written there"),
    # Peers.
    ("broadcast direct 2", 1, 1, [Send(1, 0)], "step 1 (send DATA[0] to 1)", "1 never receives"),
    ("broadcast direct 2", 1, 1, [Recv(1, 0)], "step 1 (store DATA[0] from 1)", "1 never sends"),
    ("broadcast direct 2", 0, 1, [Send(0, 0)], "step 0", "its peer is not another rank"),
    ("broadcast direct 2", 0, 1, [Send(2, 0)], "step 0", "its peer is not another rank"),
]


@pytest.mark.parametrize(("algorithm", "begin", "end", "to", "where", "why"), RULES)
def test_a_wrong_step_is_refused(
    algorithm: str, begin: int, end: int, to: list[Step], where: str, why: str
) -> None:
    collective, name, size = algorithm.split()
    with pytest.raises(ProofError) as caught:
        prove_with(collective, name, int(size), 0, slice(begin, end), to)
    assert str(caught.value).startswith(f"rank 0 {where}")
    assert why in str(caught.value)


def test_another_order_of_folds_on_one_rank_is_refused() -> None:
    other: list[Step] = [Recv(2, 0, buffer=SCRATCH), Recv(1, 0, fold=True, buffer=SCRATCH)]
    other.append(Copy(0, 0, fold=True))
    with pytest.raises(ProofError, match=r"^rank 1 DATA\[0\]: folded in another order than on r"):
        prove_with("all_reduce", "direct", 3, 0, slice(2, 5), other)


def test_a_reduce_that_leaves_a_partial_sum_behind_is_refused() -> None:
    in_place: list[Step] = [Recv(2, 0, fold=True), Send(0, 0)]
    with pytest.raises(ProofError, match=r"^rank 1 DATA\[0\]: holds chunk 0 of rank 1, 2, not"):
        prove_with("reduce", "chain", 3, 1, slice(3), in_place)


def test_a_scratch_chunk_of_another_length_is_refused() -> None:
    def doubling(rank: int, size: int) -> Iterator[Step]:
        """Fold the second of two chunks in scratch as long as the first."""
        for chunk in range(2):
            yield Send(1 - rank, chunk)
            yield Recv(1 - rank, chunk, buffer=SCRATCH)
            yield Copy(chunk, chunk, SCRATCH, Buffer.DATA, fold=True)
            yield Finish(chunk)

    def with_scratch(*like: int) -> Algorithm:
        return Algorithm(doubling, chains.gather, lambda size: 2, lambda rank, size: like)

    with pytest.raises(ProofError, match=r"^rank . step 5 .*: chunk 1 of rank . may not fit$"):
        prove("all_reduce", with_scratch(0, 0), 2)
    with pytest.raises(ProofError, match=r"DATA\[0\]: folded in another order"):
        prove("all_reduce", with_scratch(0, 1), 2)


def test_only_an_idempotent_fold_may_take_a_contribution_twice() -> None:
    rounds = [list(ALGORITHMS["barrier"]["dissemination"].steps(rank, 3)) for rank in range(3)]
    contracts = [contract_of("barrier", rank, 3, 1) for rank in range(3)]
    prove_steps(rounds, contracts, scratch=[(0,)] * 3, window=0)
    strict = [contract._replace(idempotent=False) for contract in contracts]
    with pytest.raises(ProofError, match=r"^rank . step 5 .*: rank . twice$"):
        prove_steps(rounds, strict, scratch=[(0,)] * 3, window=0)


def through_scratch(first_source: int) -> Algorithm:
    """An all-gather that sends and receives one block at a time.

    It sends to rank+1 first, and receives from rank+first_source first.
    """

    def steps(rank: int, size: int) -> Iterator[Step]:
        yield Copy(0, rank, INPUT, OUTPUT)
        for k in range(1, size):
            yield Copy(0, 0, INPUT, SCRATCH)
            yield Send((rank + k) % size, 0, SCRATCH)
        for k in range(1, size):
            source = (rank + first_source * k) % size
            yield Recv(source, 1, buffer=SCRATCH)
            yield Copy(1, source, SCRATCH, OUTPUT)

    return Algorithm(steps, chains.gather, lambda size: size, lambda rank, size: (0, 0))


def test_the_wrong_order_of_peers_deadlocks_without_staging_memory() -> None:
    for size in (2, 3, 4, 7):
        prove("all_gather", through_scratch(-1), size, window=0)
    prove("all_gather", through_scratch(1), 3, window=1)
    with pytest.raises(ProofError, match=r"^deadlock: rank .* waits for rank .* waits for rank"):
        prove("all_gather", through_scratch(1), 3, window=0)


def swap(rank: int, size: int) -> Iterator[Step]:
    """Return steps in which each of two ranks receives into the chunk that it sends."""
    yield Copy(0, rank, INPUT, OUTPUT)
    yield Copy(0, 0, INPUT, SCRATCH)
    yield Send(1 - rank, 0, SCRATCH)
    yield Recv(1 - rank, 0, buffer=SCRATCH)
    yield Copy(0, 1 - rank, SCRATCH, OUTPUT)


SWAP = Algorithm(swap, chains.gather, lambda size: size, lambda rank, size: (0,))


def test_a_store_waits_for_the_posted_send_of_the_same_chunk() -> None:
    prove("all_gather", SWAP, 2, window=1)
    with pytest.raises(ProofError) as caught:
        prove("all_gather", SWAP, 2, window=0)
    sends = [f"rank {rank} step 2 (send SCRATCH[0] to {1 - rank})" for rank in (0, 1)]
    stores = [f"rank {rank} step 3 (store SCRATCH[0] from {1 - rank})" for rank in (0, 1)]
    cycle = " waits for ".join([sends[0], stores[1], sends[1], stores[0], sends[0]])
    assert str(caught.value) == f"deadlock: {cycle}"


@pytest.mark.parametrize("window", [0, 1, 8])
def test_ranks_that_all_receive_first_deadlock_with_any_staging_memory(window: int) -> None:
    data = Contract({Buffer.DATA: 1}, precondition={}, postcondition={})
    receive_first: list[list[Step]] = [[Recv(1 - rank, 0), Send(1 - rank, 0)] for rank in range(2)]
    with pytest.raises(ProofError, match=r"^deadlock: "):
        prove_steps(receive_first, [data, data], window=window)


@pytest.mark.parametrize("n_segments", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_no_send_stages_more_segments_than_its_window(n_segments: int, window: int) -> None:
    proof = prove("all_gather", SWAP, 2, n_segments=n_segments, window=window)
    assert proof.max_staged == min(n_segments, window)


def test_invalid_calls_are_refused() -> None:
    for collective, name, size, options, why in (
        ("broadcast", "tree", 2, {}, "no algorithm 'tree' for broadcast: there are direct, bin"),
        ("send_recv", "send", 2, {}, "no collective 'send_recv'"),
        ("broadcast", "direct", 0, {}, "cannot prove"),
        ("broadcast", "direct", 2, {"root": 2}, "cannot prove"),
        ("broadcast", "direct", 2, {"n_segments": 0}, "cannot prove"),
        ("broadcast", "direct", 2, {"window": -1}, "cannot prove"),
    ):
        with pytest.raises(UsageError, match=why):
            prove(collective, name, size, **options)
