"""The double binary tree has the shape of NCCL 2.4."""

import pytest

from shoal.schedule.tree import Branch, binary_tree, double_binary_tree, tree_owner

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
