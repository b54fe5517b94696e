"""Steps, contracts and the table of algorithms."""

from __future__ import annotations

from itertools import islice

import pytest

from shoal.errors import UsageError
from shoal.schedule import (
    ALGORITHMS,
    Buffer,
    Copy,
    Finish,
    Place,
    Recv,
    Send,
    Step,
    Value,
    contract_of,
    find,
)


def test_buffers_keep_the_numbers_of_the_native_program() -> None:
    assert {b.name: b.value for b in Buffer} == {"DATA": 0, "INPUT": 1, "OUTPUT": 2, "SCRATCH": 3}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Send(2, 1), "send DATA[1] to 2"),
        (Recv(2, 1), "store DATA[1] from 2"),
        (Recv(2, 1, fold=True, buffer=Buffer.OUTPUT), "fold OUTPUT[1] from 2"),
        (Copy(0, into=1), "copy DATA[0] into SCRATCH[1]"),
        (Copy(0, 0, Buffer.INPUT, Buffer.OUTPUT, fold=True), "fold INPUT[0] into OUTPUT[0]"),
        (Finish(3), "finish DATA[3]"),
    ],
)
def test_steps_say_what_they_do(step: Step, text: str) -> None:
    assert str(step) == text


def test_steps_refuse_negative_numbers() -> None:
    for make in (
        lambda: Send(-1, 0),
        lambda: Send(0, -1),
        lambda: Recv(-1, 0),
        lambda: Recv(0, -1),
        lambda: Copy(-1, 0),
        lambda: Copy(0, -1),
        lambda: Finish(-1),
    ):
        with pytest.raises(UsageError, match="count from 0"):
            make()


def test_copy_refuses_to_copy_a_chunk_onto_itself() -> None:
    with pytest.raises(UsageError, match="onto itself"):
        Copy(1, into=1, into_buffer=Buffer.DATA)
    Copy(1, into=1)


def test_ranks_begin_with_their_own_values_and_of_a_root_only_the_root() -> None:
    for collective, rank, held in (
        ("all_reduce", 1, {Place(Buffer.DATA, c): Value(range(1, 2), c) for c in range(2)}),
        ("broadcast", 0, {Place(Buffer.DATA, c): Value(range(1), c) for c in range(2)}),
        ("broadcast", 1, {}),
        ("all_gather", 1, {Place(Buffer.INPUT, 0): Value(range(1, 2), 0)}),
        ("scatter", 0, {Place(Buffer.INPUT, c): Value(range(1), c) for c in range(2)}),
        ("scatter", 1, {}),
    ):
        assert contract_of(collective, rank, 2, n_chunks=2).precondition == held


def test_gather_leaves_nothing_to_other_ranks_and_reduce_what_they_had() -> None:
    assert contract_of("gather", 0, 2, 2, root=1).postcondition == {}
    own = {Place(Buffer.DATA, 0): Value(range(1, 2), 0)}
    assert contract_of("reduce", 1, 3, 1, root=2).postcondition == own


@pytest.mark.parametrize(
    "collective", ["all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"]
)
def test_blocks_cannot_be_cut_into_another_number_of_chunks(collective: str) -> None:
    with pytest.raises(UsageError, match=f"{collective} over 3 ranks has 3 chunks, not 4"):
        contract_of(collective, 0, 3, n_chunks=4)


def test_an_unknown_collective_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no collective 'gossip': there are all_reduce, broadcast"):
        contract_of("gossip", 0, 1, 1)


@pytest.mark.parametrize(
    ("collective", "name"), [(c, n) for c in ALGORITHMS for n in ALGORITHMS[c]]
)
def test_a_rank_of_a_large_group_takes_only_as_many_steps_as_it_has_peers(
    collective: str, name: str
) -> None:
    size = 2048
    # A block of Bruck's all-to-all is sent and received again in every second of 11 rounds.
    limit = 11 * size + 1 if (collective, name) == ("all_to_all", "bruck") else 4 * size
    assert len(list(islice(ALGORITHMS[collective][name].steps(7, size, 0), limit + 1))) <= limit


def test_an_algorithm_yields_its_first_step_before_the_others_exist() -> None:
    assert next(ALGORITHMS["all_reduce"]["ring"].steps(0, 10**9)) == Send(1, 0)


# Finding algorithms.


def test_hierarchical_algorithms_are_found_by_their_two_names() -> None:
    assert find("all_reduce", "ring/tree").by_host
    hosts = (0, 0, 1, 1, 2)
    for title, pair in (("ring_2d", "ring/ring"), ("fairring", "sharded/sharded")):
        for rank in range(5):
            named = find("all_reduce", title).steps(rank, 5, 0, hosts)
            assert list(named) == list(find("all_reduce", pair).steps(rank, 5, 0, hosts))


def test_an_algorithm_is_made_once() -> None:
    for name in ("ring", "sharded(4)", "sharded(4)/tree"):
        assert find("all_reduce", name) is find("all_reduce", name)


@pytest.mark.parametrize("name", ["", "rings", "sharded()", "sharded(-1)", "sharded(4", "ring(2)"])
def test_a_wrong_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find("all_reduce", name)
    assert str(caught.value) == (
        f"no algorithm {name!r} for all_reduce: there are {', '.join(ALGORITHMS['all_reduce'])}, "
        "sharded(k) with k reducers, sharded[8*1|4*3] with weights of workers and servers, "
        "and local/across such as sharded/ring"
    )


@pytest.mark.parametrize("name", ["sharded(0)", "sharded(0)/ring", "ring/sharded(0)"])
def test_no_reducer_at_all_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"sharded\(0\): at least one"):
        find("all_reduce", name)


@pytest.mark.parametrize("name", ["ring/ring", "sharded(2)"])
def test_only_all_reduce_takes_compound_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"for broadcast: there are direct, .* scatter_gather$"):
        find("broadcast", name)


def test_hosts_that_do_not_match_the_size_are_refused() -> None:
    with pytest.raises(UsageError, match="one entry per rank: 3 for 4 ranks"):
        find("all_reduce", "ring_2d").steps(0, 4, 0, (0, 0, 1))


@pytest.mark.parametrize("hosts", [(0, 2, 2), (1, 0, 0), (0, 0, -1), (1, 1, 1)])
def test_hosts_that_are_not_numbered_as_they_come_up_are_refused(hosts: tuple[int, ...]) -> None:
    for ask in (
        lambda: find("all_reduce", "ring_2d").steps(0, 3, 0, hosts),
        lambda: find("all_reduce", "ring_2d").n_chunks(3, hosts),
    ):
        with pytest.raises(UsageError, match="numbered from 0 in order of first appearance"):
            ask()
