"""Kinds of calls: where their chunks lie."""

import pytest

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.schedule import Buffer
from shoal.shapes import Shape, describe, layouts_of

EVEN = Shape("all_gather", "direct", DType.FLOAT32, Op.SUM, 3, rank=1, size=3)
UNEVEN = EVEN._replace(n_elems=0, blocks=(5, 0, 2))


def lengths(shape: Shape) -> list[list[int]]:
    return [layout[1] for layout in layouts_of(shape)[: Buffer.SCRATCH]]


def test_a_gather_reads_the_own_block_and_writes_all() -> None:
    assert lengths(EVEN) == [[], [12], [12, 12, 12]]
    assert lengths(UNEVEN) == [[], [0], [20, 0, 8]]
    assert layouts_of(UNEVEN)[Buffer.OUTPUT][0] == [0, 20, 20]


def test_only_the_root_has_all_blocks() -> None:
    gather = EVEN._replace(collective="gather", root=1)
    assert lengths(gather) == [[], [12], [12, 12, 12]]
    assert lengths(gather._replace(root=0)) == [[], [12], []]
    scatter = gather._replace(collective="scatter")
    assert lengths(scatter) == [[], [12, 12, 12], [12]]
    assert lengths(scatter._replace(root=0)) == [[], [], [12]]


def test_an_exchange_has_lengths_of_its_own_on_both_sides() -> None:
    shape = Shape("all_to_all", "pairwise", DType.INT16, Op.SUM, 0, rank=0, size=2)
    assert lengths(shape._replace(n_elems=3)) == [[], [6, 6], [6, 6]]
    assert lengths(shape._replace(sent=(1, 4), taken=(1, 0))) == [[], [2, 8], [2, 0]]


def test_lengths_that_only_two_ranks_know_are_in_no_description() -> None:
    shape = Shape("all_to_all", "pairwise", DType.INT16, Op.SUM, 3, rank=0, size=2)
    assert shape.agrees_by_pair
    assert describe(shape) == "all_to_all int16 by pairwise"
    bruck = shape._replace(algorithm="bruck")
    assert not bruck.agrees_by_pair
    assert describe(bruck) == "all_to_all int16[3] by bruck"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (UNEVEN, "all_gather float32[5,0,2] by direct"),
        (EVEN._replace(collective="reduce", root=2), "reduce float32[3] sum to rank 2 by direct"),
        (EVEN._replace(collective="gather"), "gather float32[3] to rank 0 by direct"),
        (EVEN._replace(collective="scatter"), "scatter float32[3] from rank 0 by direct"),
        (
            EVEN._replace(collective="barrier", algorithm="dissemination"),
            "barrier by dissemination",
        ),
    ],
)
def test_a_call_is_described_as_its_user_knows_it(shape: Shape, words: str) -> None:
    assert describe(shape) == words


@pytest.mark.parametrize(
    ("algorithm", "mib", "size", "kib"),
    [
        ("sharded", 25, 8, 32),  # 64 in a chunk of 3 MiB
        ("sharded", 100, 8, 32),  # a segment to each of 8 is 256 KiB
        ("sharded", 100, 4, 64),
        ("sharded", 100, 2, 128),
        ("sharded[8*0|8*1]", 100, 16, 32),
        ("sharded", 100, 32, 32),  # no less, for the messages
        ("ring", 100, 8, 128),
    ],
)
def test_what_goes_to_all_reducers_in_turn_is_no_more_than_a_slow_link_may_hold(
    algorithm: str, mib: int, size: int, kib: int
) -> None:
    shape = Shape("all_reduce", algorithm, DType.FLOAT32, Op.SUM, mib << 18, 0, size)
    assert shape._replace(hosts=tuple(range(size))).segment_bytes == kib << 10
    assert shape._replace(hosts=(0,) * size).segment_bytes == 128 << 10, "not between hosts"


@pytest.mark.parametrize(
    ("mib", "size", "kib"), [(25, 8, 64), (100, 8, 64), (100, 32, 64), (50, 2, 128)]
)
def test_elements_that_travel_in_half_the_bytes_travel_twice_as_many_at_a_time(
    mib: int, size: int, kib: int
) -> None:
    """On the wire a segment is as long as one of float32."""
    shape = Shape("all_reduce", "sharded", DType.FLOAT32, Op.SUM, mib << 18, 0, size)
    narrow = shape._replace(hosts=tuple(range(size)), codec=Codec.BF16)
    assert narrow.segment_bytes == kib << 10
