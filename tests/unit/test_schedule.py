"""Steps, contracts, the table of algorithms, names of those by weights, and NCCL's trees."""

from itertools import islice, product

import pytest
from programs import EVERY

from shoal.errors import UsageError
from shoal.schedule import ALGORITHMS, find
from shoal.schedule.collectives import Place, Value, contract_of
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send
from shoal.schedule.tree import Branch, binary_tree, double_binary_tree, tree_owner
from shoal.schedule.weights import Weights, parse


def test_steps_refuse_negative_numbers_and_a_copy_of_a_chunk_onto_itself() -> None:
    Copy(1, into=1)
    negative = [*product((Send, Recv, Copy), ((-1, 0), (0, -1))), (Finish, (-1,))]
    for kind, numbers in negative:
        with pytest.raises(UsageError, match="count from 0"):
            kind(*numbers)
    with pytest.raises(UsageError, match="onto itself"):
        Copy(1, into=1, into_buffer=Buffer.DATA)


def test_ranks_begin_with_their_values_and_only_a_root_with_its_buffer() -> None:
    for collective, rank, held in (
        ("all_reduce", 1, {Place(Buffer.DATA, c): Value(range(1, 2), c) for c in range(2)}),
        ("broadcast", 0, {Place(Buffer.DATA, c): Value(range(1), c) for c in range(2)}),
        ("broadcast", 1, {}),
        ("all_gather", 1, {Place(Buffer.INPUT, 0): Value(range(1, 2), 0)}),
        ("scatter", 0, {Place(Buffer.INPUT, c): Value(range(1), c) for c in range(2)}),
        ("scatter", 1, {}),
    ):
        assert contract_of(collective, rank, 2, n_chunks=2).precondition == held
    assert contract_of("gather", 0, 2, 2, root=1).postcondition == {}
    own = {Place(Buffer.DATA, 0): Value(range(1, 2), 0)}
    assert contract_of("reduce", 1, 3, 1, root=2).postcondition == own
    for collective in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        with pytest.raises(UsageError, match=f"{collective} over 3 ranks has 3 chunks, not 4"):
            contract_of(collective, 0, 3, n_chunks=4)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_rank_of_a_large_group_takes_few_steps(collective: str, name: str) -> None:
    assert next(ALGORITHMS["all_reduce"]["ring"].steps(0, 10**9)) == Send(1, 0)  # lazily
    size = 2048
    # Bruck's all-to-all sends and receives a block again in every second of 11 rounds.
    limit = 11 * size + 1 if (collective, name) == ("all_to_all", "bruck") else 4 * size
    assert len(list(islice(ALGORITHMS[collective][name].steps(7, size, 0), limit + 1))) <= limit


def test_hierarchical_algorithms_are_found_by_two_names() -> None:
    assert find("all_reduce", "ring/tree").by_host
    hosts = (0, 0, 1, 1, 2)
    for name in ("ring", "sharded[4*1|2*1]", "sharded/tree"):
        assert find("all_reduce", name) is find("all_reduce", name)  # made once
    for title, pair in (("ring_2d", "ring/ring"), ("fairring", "sharded/sharded")):
        for rank in range(5):
            named = find("all_reduce", title).steps(rank, 5, 0, hosts)
            assert list(named) == list(find("all_reduce", pair).steps(rank, 5, 0, hosts))


UNSUITABLE = ["direct", "doubling", "ring_2d", "fairring", "ring/ring", "rings", ""]


def test_errors_about_names_list_valid_ones() -> None:
    every = r"for all_reduce: there are .*tree.*, sharded\[8\*1.*local/across"
    for collective, names, why in (
        ("all_reduce", ["", "rings", "sharded(2)", "ring(2)"], every),
        # Unsuitable for a level, inside a host or between hosts.
        ("all_reduce", [f"{local}/ring" for local in UNSUITABLE], "sharded, ring, "),
        ("all_reduce", [f"ring/{across}" for across in UNSUITABLE[2:]], "sharded, ring, "),
        # Only all-reduce takes compound names.
        ("broadcast", ["ring/ring", "sharded[2*1|]"], "for broadcast: .* scatter_gather$"),
        ("gossip", [""], "no collective 'gossip': there are all_reduce, broadcast"),
    ):
        for name in names:
            with pytest.raises(UsageError, match=why):
                find(collective, name)


@pytest.mark.parametrize("hosts", [(0, 2, 2), (1, 0, 0), (0, 0, -1), (1, 1, 1)])
def test_hosts_not_numbered_in_order_of_appearance_are_refused(hosts: tuple[int, ...]) -> None:
    for ask in (
        lambda: find("all_reduce", "ring_2d").steps(0, 3, 0, hosts),
        lambda: find("all_reduce", "ring_2d").n_chunks(3, hosts),
    ):
        with pytest.raises(UsageError, match="numbered from 0 in order of first appearance"):
            ask()
    with pytest.raises(UsageError, match="one entry per rank: 3 for 4 ranks"):
        find("all_reduce", "ring_2d").steps(0, 4, 0, (0, 0, 1))


def test_weights_have_one_name_that_parses_to_them() -> None:
    for weights, part, name in (
        (Weights((1,) * 8, (3,) * 4), "", "sharded[8*1|4*3]"),
        (Weights((1,) * 8, (3,) * 4), "servers", "sharded[8*1|4*3].servers"),
        (Weights((2,) * 8, (6,) * 4), "workers", "sharded[8*1|4*3].workers"),
        (Weights((1, 2, 2, 0)), "", "sharded[1,2*2,0|]"),
        (Weights((0, 0), (5, 10)), "servers", "sharded[2*0|1,2].servers"),
        (Weights((1,) * 4096, (7,) * 4096), "", "sharded[4096*1|4096*7]"),
    ):
        assert weights.name(part) == name
        assert parse(name) == (weights.reduced, part)
        assert parse("sharded[1,1,2|3,3]") == parse("sharded[2*1,1*2|2*3]")


def test_an_invalid_name_is_refused_with_the_reason() -> None:
    forms = ["sharded[8*1]", "sharded[8*1|4*3].both", "sharded[8*1|4*3]/ring", "sharded[8*-1|]"]
    forms += ["sharded[8*1.5|]", "sharded[|4*3]", "sharded[\u0663*1|]", "sharded[8*1|4*3]\n"]
    weights = ["8*1,|", "1|2**3", "0*1|1", "1|12345678", "12345*1|"]
    for name, why in (
        *dict.fromkeys(forms, "write sharded[8*1|4*3]").items(),
        *((f"sharded[{one}]", "cannot read the weights") for one in weights),
        ("sharded[4097*1|]", "4097 workers; the limit is 4096"),
        ("sharded[1|4000*1,97*1]", "4097 servers; the limit is 4096"),
        ("sharded[1048577|]", "a weight of 1048577 among the workers"),
        ("sharded[4*0|2*0]", "all weights are 0"),
        ("sharded[4*1|].servers", "the servers have no part"),
        ("sharded[4*1|2*0].servers", "the servers have no part"),
        ("sharded[4*0|2*1].workers", "the workers have no part"),
        ("sharded[" + "1," * 2048 + "1|]", "the name has 4107 B; the limit is 4096 B"),
        ("sharded[" + ",".join(["9999*1"] * 580) + "|]", "5799420 workers"),
        ("sharded[1\n\x1b[2J|]", ""),
        ("sharded[\n\x1b[2J" + "1," * 4096, ""),
    ):
        with pytest.raises(UsageError) as caught:
            find("all_reduce", name)
        assert why in str(caught.value)
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()
    for collective, name in (("reduce", "sharded[2*1|]"), ("all_reduce", "ring/sharded[2*1|]")):
        with pytest.raises(UsageError, match="no algorithm"):
            find(collective, name)


def test_a_name_must_fit_the_size_of_the_group() -> None:
    whole, servers, workers = (
        find("all_reduce", f"sharded[4*1|2*3]{part}") for part in ("", ".servers", ".workers")
    )
    for algorithm, size in ((whole, 4), (servers, 5), (workers, 6)):
        for ask in (
            lambda algorithm=algorithm, size=size: algorithm.n_chunks(size),
            lambda algorithm=algorithm, size=size: algorithm.scratch(0, size),
            lambda algorithm=algorithm, size=size: list(algorithm.steps(0, size)),
            lambda algorithm=algorithm, size=size: algorithm.fitted(1 << 20, size).n_chunks(size),
        ):
            with pytest.raises(UsageError, match=f"is for 4 workers.*not for a group of {size}"):
                ask()


# The parent of every rank, by hand from the pattern of the paper's figure 1.
FIRST = {
    5: [None, 2, 4, 2, 0],
    8: [None, 2, 4, 2, 0, 6, 4, 6],
    10: [None, 2, 4, 2, 8, 6, 4, 6, 0, 8],
    13: [None, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8],
    14: [None, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12],
}
# Figure 2 and the two pictures of the second tree in NCCL's documentation of its trees: 12
# ranks mirrored, 13 shifted. Smaller ones by hand.
SECOND = {
    5: [1, None, 3, 0, 3],
    6: [1, 5, 3, 1, 3, None],
    12: [1, 3, 1, 11, 5, 7, 5, 3, 9, 7, 9, None],
    13: [9, None, 3, 5, 3, 9, 7, 5, 7, 1, 11, 0, 11],
}
SIZES = [*range(1, 70), 100, 127, 128, 129, 1000, 24576]


def both(size: int) -> tuple[tuple[Branch, ...], ...]:
    return tuple(zip(*(double_binary_tree(rank, size) for rank in range(size)), strict=True))


def test_trees_have_the_parents_and_children_of_the_figures() -> None:
    for size, parents in FIRST.items():
        assert [binary_tree(rank, size).parent for rank in range(size)] == parents
        assert [branch.parent for branch in both(size)[0]] == parents
    for size, parents in SECOND.items():
        assert [branch.parent for branch in both(size)[1]] == parents
    assert binary_tree(12, 14) == Branch(8, (10, 13))
    assert binary_tree(0, 14) == Branch(None, (8,))


@pytest.mark.parametrize("size", SIZES)
def test_both_trees_are_balanced_and_share_no_inner_rank(size: int) -> None:
    trees = both(size)
    for chunk, tree in enumerate(trees):
        down = sorted((rank, child) for rank in range(size) for child in tree[rank].children)
        up = sorted((b.parent, rank) for rank, b in enumerate(tree) if b.parent is not None)
        assert down == up
        assert len(up) == size - 1
        assert tree[tree_owner(chunk, size)].parent is None
        for rank in range(size):
            depth, above = 0, tree[rank].parent
            while above is not None:
                depth, above = depth + 1, tree[above].parent
            assert 2**depth < 2 * size
    for rank, (first, second) in enumerate(zip(*trees, strict=True)):
        assert len(first.children) + len(second.children) <= 2
        if rank > 0 or size % 2 == 0:
            assert not first.children or not second.children
        else:
            # Of an odd number, rank 0 is the first root and the second tree's last place.
            assert len(first.children) <= 1
