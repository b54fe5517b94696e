"""Kinds of calls: the places of their chunks."""

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.schedule import Buffer
from shoal.shapes import Shape, describe, layouts_of

EVEN = Shape("all_gather", "direct", DType.FLOAT32, Op.SUM, 3, rank=1, size=3)
UNEVEN = EVEN._replace(n_elems=0, blocks=(5, 0, 2))


def lengths(shape: Shape) -> list[list[int]]:
    return [layout[1] for layout in layouts_of(shape)[: Buffer.SCRATCH]]


def test_buffers_hold_the_blocks_that_ranks_read_and_write() -> None:
    assert lengths(EVEN) == [[], [12], [12, 12, 12]]
    assert lengths(UNEVEN) == [[], [0], [20, 0, 8]]
    assert layouts_of(UNEVEN)[Buffer.OUTPUT][0] == [0, 20, 20]
    # Only the root has all blocks.
    gather = EVEN._replace(collective="gather", root=1)
    assert lengths(gather) == [[], [12], [12, 12, 12]]
    assert lengths(gather._replace(root=0)) == [[], [12], []]
    scatter = gather._replace(collective="scatter")
    assert lengths(scatter) == [[], [12, 12, 12], [12]]
    assert lengths(scatter._replace(root=0)) == [[], [], [12]]
    # An exchange has different lengths on both sides.
    shape = Shape("all_to_all", "pairwise", DType.INT16, Op.SUM, 0, rank=0, size=2)
    assert lengths(shape._replace(n_elems=3)) == [[], [6, 6], [6, 6]]
    assert lengths(shape._replace(sent=(1, 4), taken=(1, 0))) == [[], [2, 8], [2, 0]]


def test_a_call_is_described_in_its_users_terms() -> None:
    barrier = EVEN._replace(collective="barrier", algorithm="dissemination")
    pairwise = Shape("all_to_all", "pairwise", DType.INT16, Op.SUM, 3, rank=0, size=2)
    for shape, words in (
        (UNEVEN, "all_gather float32[5,0,2] by direct"),
        (EVEN._replace(collective="reduce", root=2), "reduce float32[3] sum to rank 2 by direct"),
        (EVEN._replace(collective="gather"), "gather float32[3] to rank 0 by direct"),
        (EVEN._replace(collective="scatter"), "scatter float32[3] from rank 0 by direct"),
        (barrier, "barrier by dissemination"),
        # Descriptions omit lengths that only two ranks know.
        (pairwise, "all_to_all int16 by pairwise"),
        (pairwise._replace(algorithm="bruck"), "all_to_all int16[3] by bruck"),
    ):
        assert describe(shape) == words
        assert shape.agrees_by_pair == (shape is pairwise)


def test_segments_to_all_reducers_in_turn_fit_a_slow_links_queue() -> None:
    for algorithm, mib, size, kib, narrow_kib in (
        ("sharded", 25, 8, 32, 64),  # 64 in a chunk of 3 MiB
        ("sharded", 100, 8, 32, 64),  # a segment to each of 8 is 256 KiB
        ("sharded", 100, 4, 64, 128),
        ("sharded", 100, 2, 128, 128),
        ("sharded[8*0|8*1]", 100, 16, 32, 64),
        ("sharded", 100, 32, 32, 64),  # no shorter, because of the cost per message
        ("ring", 100, 8, 128, 128),
    ):
        shape = Shape("all_reduce", algorithm, DType.FLOAT32, Op.SUM, mib << 18, 0, size)
        apart = shape._replace(hosts=tuple(range(size)))
        assert apart.segment_bytes == kib << 10
        # On the wire a segment of half the bytes is as long as one of float32.
        assert apart._replace(codec=Codec.BF16).segment_bytes == narrow_kib << 10
        assert shape._replace(hosts=(0,) * size).segment_bytes == 128 << 10, "not between hosts"
