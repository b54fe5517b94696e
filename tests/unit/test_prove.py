"""The prover refuses wrong schedules, and says which rank's step is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.analysis.prove.prover import prove, prove_steps
from shoal.errors import ProofError, UsageError
from shoal.schedule import (
    ALGORITHMS,
    Algorithm,
    Buffer,
    Contract,
    Copy,
    Finish,
    Recv,
    Send,
    Step,
    contract_of,
)

WHOLE_GROUP = [(c, name) for c in ALGORITHMS for name in ALGORITHMS[c]]
INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def one_per_rank(size: int) -> int:
    return size


def prove_changed(
    collective: str,
    name: str,
    size: int,
    *,
    rank: int = 0,
    at: int,
    to: list[Step],
    n_left_out: int = 1,
) -> None:
    """Prove an algorithm of which `rank` does something else from its step `at` on."""
    algorithm = ALGORITHMS[collective][name]
    schedule = [list(algorithm.steps(r, size)) for r in range(size)]
    schedule[rank][at : at + n_left_out] = to
    contracts = [contract_of(collective, r, size, algorithm.n_chunks(size)) for r in range(size)]
    prove_steps(
        schedule,
        contracts,
        scratch=[algorithm.scratch(rank, size) for rank in range(size)],
        window=0,
    )


@pytest.mark.parametrize(("collective", "name"), WHOLE_GROUP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_algorithm_can_do_without_any_of_its_steps(
    collective: str, name: str, size: int
) -> None:
    for rank in range(size):
        for at, step in enumerate(ALGORITHMS[collective][name].steps(rank, size)):
            with pytest.raises(ProofError):
                prove_changed(collective, name, size, rank=rank, at=at, to=[])
            prove_changed(collective, name, size, rank=rank, at=at, to=[step])


# What a value holds.


def test_a_ring_without_finish_is_refused() -> None:
    with pytest.raises(ProofError, match=r"^rank 0 DATA\[1\]: never finished$"):
        prove_changed("all_reduce", "ring", 3, at=4, to=[])


def test_finishing_twice_is_refused() -> None:
    with pytest.raises(
        ProofError, match=r"^rank 0 step 5 \(finish DATA\[1\]\): finishes chunk 1 .* again$"
    ):
        prove_changed("all_reduce", "ring", 3, at=4, to=[Finish(1), Finish(1)])


def test_finishing_what_is_not_reduced_is_refused() -> None:
    with pytest.raises(ProofError, match=r"^rank 0 DATA\[0\]: should not be finished$"):
        prove_changed("broadcast", "direct", 1, at=0, to=[Finish(0)])


def test_folding_after_finish_is_refused() -> None:
    swapped: list[Step] = [Finish(0), Recv(1, 0, fold=True)]
    with pytest.raises(ProofError, match=r"^rank 0 step 2 .* nothing may be folded after Finish$"):
        prove_changed("all_reduce", "sharded", 2, at=1, to=swapped, n_left_out=2)


def test_a_contribution_folded_twice_is_refused() -> None:
    twice: list[Step] = [Copy(0, 0), Copy(0, 0, fold=True)]
    with pytest.raises(ProofError, match=r"step 2 .*of rank 0 into chunk 0 of rank 0: rank 0 twi"):
        prove_changed("all_reduce", "direct", 2, at=1, to=twice)


def test_a_store_where_a_fold_belongs_is_refused() -> None:
    with pytest.raises(ProofError, match=r": holds chunk 0 of rank 1, finished, not .* rank 0, 1$"):
        prove_changed("all_reduce", "sharded", 2, at=1, to=[Recv(1, 0)])


def test_another_order_of_folds_on_one_rank_is_refused() -> None:
    other: list[Step] = [
        Recv(2, 0, buffer=SCRATCH),
        Recv(1, 0, fold=True, buffer=SCRATCH),
        Copy(0, 0, fold=True),
    ]
    with pytest.raises(
        ProofError, match=r"^rank 1 DATA\[0\]: folded in another order than on rank 0$"
    ):
        prove_changed("all_reduce", "direct", 3, at=2, to=other, n_left_out=3)


def test_folding_different_chunks_together_is_refused() -> None:
    with pytest.raises(ProofError, match=r"^rank 0 step 0 .*: they are different chunks$"):
        prove_changed(
            "all_reduce",
            "ring",
            2,
            at=0,
            to=[Copy(1, 0, into_buffer=Buffer.DATA, fold=True)],
            n_left_out=0,
        )


def test_a_chunk_stored_where_it_may_not_fit_is_refused() -> None:
    with pytest.raises(ProofError, match=r"^rank 0 step 0 .*: chunk 1 of rank 0 may not fit$"):
        prove_changed(
            "all_reduce", "ring", 2, at=0, to=[Copy(1, 0, into_buffer=Buffer.DATA)], n_left_out=0
        )


def test_a_scratch_chunk_of_another_length_is_refused() -> None:
    def doubling(rank: int, size: int) -> Iterator[Step]:
        """Of two chunks: the second is folded where there is room for the first."""
        for chunk in range(2):
            yield Send(1 - rank, chunk)
            yield Recv(1 - rank, chunk, buffer=SCRATCH)
            yield Copy(chunk, chunk, SCRATCH, Buffer.DATA, fold=True)
            yield Finish(chunk)

    def with_scratch(*like: int) -> Algorithm:
        return Algorithm(doubling, lambda size: 2, lambda rank, size: like)

    with pytest.raises(ProofError, match=r"^rank . step 5 .*: chunk 1 of rank . may not fit$"):
        prove("all_reduce", with_scratch(0, 0), 2)
    with pytest.raises(ProofError, match=r"DATA\[0\]: folded in another order"):
        prove("all_reduce", with_scratch(0, 1), 2)


def test_a_block_on_its_way_through_another_ones_place_is_refused() -> None:
    detour: list[Step] = [
        Recv(2, 1, buffer=OUTPUT),
        Copy(1, 2, OUTPUT, OUTPUT),
        Recv(1, 1, buffer=OUTPUT),
    ]
    with pytest.raises(ProofError, match=r"^rank 0 step 3 .*: chunk 0 of rank 2 may not fit$"):
        prove_changed("all_gather", "direct", 3, at=3, to=detour, n_left_out=2)


def test_only_an_idempotent_fold_may_take_a_contribution_twice() -> None:
    rounds = [list(ALGORITHMS["barrier"]["dissemination"].steps(rank, 3)) for rank in range(3)]
    contracts = [contract_of("barrier", rank, 3, 1) for rank in range(3)]
    prove_steps(rounds, contracts, scratch=[(0,)] * 3, window=0)
    strict = [contract._replace(idempotent=False) for contract in contracts]
    with pytest.raises(ProofError, match=r"^rank . step 5 .*: rank . twice$"):
        prove_steps(rounds, strict, scratch=[(0,)] * 3, window=0)


def test_a_barrier_that_does_not_hear_of_everyone_is_refused() -> None:
    with pytest.raises(ProofError, match=r"DATA\[0\]: holds .* not chunk 0 of rank 0, 1, 2$"):
        prove_changed("barrier", "dissemination", 3, at=5, to=[])


def test_a_reduce_that_leaves_a_partial_sum_behind_is_refused() -> None:
    in_place: list[Step] = [Recv(2, 0, fold=True), Send(0, 0)]
    with pytest.raises(ProofError, match=r"^rank 1 DATA\[0\]: holds chunk 0 of rank 1, 2, not"):
        prove_changed("reduce", "chain", 3, rank=1, at=0, to=in_place, n_left_out=3)


# Which places a step may touch.


@pytest.mark.parametrize(
    "write",
    [
        Recv(1, 1, buffer=INPUT),
        Recv(1, 1, fold=True, buffer=INPUT),
        Copy(1, 0, INPUT, INPUT),
        Finish(1, INPUT),
    ],
    ids=str,
)
def test_a_write_to_input_is_refused(write: Step) -> None:
    send = [Send(0, 1, INPUT)] if isinstance(write, Recv) else []
    ranks: list[list[Step]] = [[write], [*send]]
    with pytest.raises(ProofError, match=r"^rank 0 step 0 \(.*\): writes INPUT$"):
        prove_steps(ranks, [contract_of("reduce_scatter", r, 2, 2) for r in range(2)])


@pytest.mark.parametrize(
    "step", [Finish(2), Finish(0, OUTPUT), Copy(0, into=0), Copy(5, into=0)], ids=str
)
def test_a_chunk_that_is_not_there_is_refused(step: Step) -> None:
    with pytest.raises(ProofError, match=r"^rank 0 step 0 \(.*\): there is no such chunk$"):
        prove_changed("all_reduce", "ring", 2, at=0, to=[step], n_left_out=0)


@pytest.mark.parametrize(
    "step",
    [Copy(0, into=0, buffer=OUTPUT), Finish(0, OUTPUT), Copy(0, 0, INPUT, OUTPUT, fold=True)],
    ids=str,
)
def test_reading_what_was_never_written_is_refused(step: Step) -> None:
    with pytest.raises(ProofError, match=r"^rank 0 step 0 \(.*\): nothing was ever written there$"):
        prove_changed("reduce_scatter", "ring", 4, at=0, to=[step], n_left_out=0)


def test_a_contract_place_that_is_never_written_is_refused() -> None:
    with pytest.raises(ProofError, match=r"^rank 0 OUTPUT\[0\]: nothing was ever written there$"):
        prove_changed("all_gather", "ring", 1, at=0, to=[])


# Who talks to whom.


def test_an_unmatched_send_is_refused() -> None:
    with pytest.raises(
        ProofError, match=r"^rank 0 step 1 \(send DATA\[0\] to 1\): rank 1 never receives it$"
    ):
        prove_changed("broadcast", "direct", 2, at=1, to=[Send(1, 0)], n_left_out=0)


def test_an_unmatched_receive_is_refused() -> None:
    with pytest.raises(
        ProofError, match=r"^rank 0 step 1 \(store DATA\[0\] from 1\): rank 1 never sends it$"
    ):
        prove_changed("broadcast", "direct", 2, at=1, to=[Recv(1, 0)], n_left_out=0)


@pytest.mark.parametrize("peer", [0, 2])
def test_a_peer_that_is_no_other_rank_is_refused(peer: int) -> None:
    with pytest.raises(
        ProofError, match=r"^rank 0 step 0 \(.*\): its peer is not another rank of the group$"
    ):
        prove_changed("broadcast", "direct", 2, at=0, to=[Send(peer, 0)])


# Who waits for whom.


def through_scratch(rank: int, size: int, first_source: int) -> Iterator[Step]:
    """An all-gather that sends one block at a time, and takes one at a time.

    It sends to rank+1 first. `first_source` says from whom it takes first: -1 is rank-1.
    """
    yield Copy(0, rank, INPUT, OUTPUT)
    for k in range(1, size):
        yield Copy(0, 0, INPUT, SCRATCH)
        yield Send((rank + k) % size, 0, SCRATCH)
    for k in range(1, size):
        source = (rank + first_source * k) % size
        yield Recv(source, 1, buffer=SCRATCH)
        yield Copy(1, source, SCRATCH, OUTPUT)


def scratch_algorithm(first_source: int) -> Algorithm:
    return Algorithm(
        lambda rank, size: through_scratch(rank, size, first_source),
        one_per_rank,
        lambda rank, size: (0, 0),
    )


def test_the_wrong_order_of_peers_deadlocks_without_staging_memory() -> None:
    for size in (2, 3, 4, 7):
        prove("all_gather", scratch_algorithm(-1), size, window=0)
    prove("all_gather", scratch_algorithm(1), 3, window=1)
    with pytest.raises(ProofError, match=r"^deadlock: rank .* waits for rank .* waits for rank"):
        prove("all_gather", scratch_algorithm(1), 3, window=0)


def one_scratch_ring(rank: int, size: int) -> Iterator[Step]:
    """The ring reduce-scatter with every partial sum in the same scratch chunk."""
    for step in ALGORITHMS["reduce_scatter"]["ring"].steps(rank, size):
        if isinstance(step, Copy) and step.into_buffer is SCRATCH:
            yield Copy(step.chunk, 0, INPUT)
        elif isinstance(step, Send) and step.buffer is SCRATCH:
            yield Send(step.peer, 0, SCRATCH)
        elif isinstance(step, Recv) and step.buffer is SCRATCH:
            yield Recv(step.peer, 0, True, SCRATCH)
        else:
            yield step


def test_the_ring_reduce_scatter_needs_its_second_scratch_chunk() -> None:
    algorithm = Algorithm(one_scratch_ring, one_per_rank, lambda rank, size: (0,))
    prove("reduce_scatter", algorithm, 4, window=1)
    with pytest.raises(ProofError, match=r"^deadlock: .*SCRATCH\[0\]"):
        prove("reduce_scatter", algorithm, 4, window=0)


def swap(rank: int, size: int) -> Iterator[Step]:
    """Each of two ranks receives into the chunk that it is sending."""
    yield Copy(0, rank, INPUT, OUTPUT)
    yield Copy(0, 0, INPUT, SCRATCH)
    yield Send(1 - rank, 0, SCRATCH)
    yield Recv(1 - rank, 0, buffer=SCRATCH)
    yield Copy(0, 1 - rank, SCRATCH, OUTPUT)


SWAP = Algorithm(swap, one_per_rank, lambda rank, size: (0,))


def test_a_store_waits_for_the_posted_send_of_the_same_chunk() -> None:
    prove("all_gather", SWAP, 2, window=1)
    with pytest.raises(ProofError) as caught:
        prove("all_gather", SWAP, 2, window=0)
    assert str(caught.value) == "deadlock: " + " waits for ".join(
        [
            "rank 0 step 2 (send SCRATCH[0] to 1)",
            "rank 1 step 3 (store SCRATCH[0] from 0)",
            "rank 1 step 2 (send SCRATCH[0] to 0)",
            "rank 0 step 3 (store SCRATCH[0] from 1)",
            "rank 0 step 2 (send SCRATCH[0] to 1)",
        ]
    )


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


# Calls that make no sense.


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        UsageError, match="no algorithm 'tree' for broadcast: there are direct, bin"
    ):
        prove("broadcast", "tree", 2)


def test_half_a_transfer_cannot_be_proved_alone() -> None:
    with pytest.raises(UsageError, match="no collective 'send_recv'"):
        prove("send_recv", "send", 2)


@pytest.mark.parametrize(
    ("size", "options"),
    [(0, {}), (2, {"root": 2}), (2, {"n_segments": 0}), (2, {"window": -1})],
)
def test_numbers_that_make_no_sense_are_refused(size: int, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="cannot prove"):
        prove("broadcast", "direct", size, **options)
