"""Kinds of calls: descriptions, chunks' places, lowered steps and errors."""

import sys
from typing import Any

import pytest
from programs import EVERY, MORE_ALL_REDUCES

from shoal.analysis.dataflow import Dataflow
from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import Arena, Fault, Mesh, Plan, RankInfo, address_of, error_from, lower, plan_for
from shoal.errors import Closed, InternalError, PeerLost, TimedOut, UsageError
from shoal.schedule import ALGORITHMS, Buffer, Finish, Recv, Send, find
from shoal.schedule.stripes import STRIPE_FLOOR_BYTES
from shoal.shapes import Shape, agreement, describe, layouts_of

SHAPE = Shape("all_reduce", "ring", DType.FLOAT32, Op.SUM, 1000, rank=1, size=4)


def test_a_description_names_everything_that_ranks_must_agree_on() -> None:
    assert describe(SHAPE) == "all_reduce float32[1000] sum by ring"
    changes: list[dict[str, Any]] = [{}, {"n_elems": 1001}, {"dtype": DType.INT32}, {"op": Op.MAX}]
    broadcast = {"collective": "broadcast", "algorithm": "direct"}
    changes += [{"algorithm": "sharded"}, broadcast, broadcast | {"root": 1}]
    assert len({describe(SHAPE._replace(**change)) for change in changes}) == len(changes)
    assert len({describe(SHAPE._replace(rank=rank)) for rank in range(4)}) == 1
    assert plan_for(SHAPE) is plan_for(Shape(*SHAPE))
    # Both ends of a message agree, and each names its call.
    send = Shape("send_recv", "send", DType.INT8, Op.SUM, 3, rank=1, size=4, root=2)
    recv = Shape("send_recv", "recv", DType.INT8, Op.SUM, 3, rank=2, size=4, root=1)
    assert agreement(send) == agreement(recv)
    assert describe(send) == "send int8[3] to rank 2"
    assert describe(recv) == "recv int8[3] from rank 1"
    assert describe(recv._replace(root=-1)) == "recv int8[3] from any rank"


def test_calls_of_different_lengths_share_a_program_if_cut_equally() -> None:
    short = SHAPE._replace(algorithm="sharded", n_elems=3 * STRIPE_FLOOR_BYTES // 4)
    assert short.found is short._replace(n_elems=short.n_elems + 1).found
    assert short.found is not short._replace(n_elems=short.n_elems - 1).found
    whole = [short._replace(n_elems=n_elems).found for n_elems in (1 << 20, 1 << 24)]
    assert whole == [ALGORITHMS["all_reduce"]["sharded"]] * 2


def test_a_finish_step_is_kept_only_where_it_divides_and_peers_are_in_the_group() -> None:
    steps = list(ALGORITHMS["all_reduce"]["ring"].steps(0, 4))
    assert len(lower(steps, 4).waits_for) == len(steps)
    assert sum(isinstance(step, Finish) for step in steps) == 1
    assert len(lower(steps, 4, finish=False).waits_for) == len(steps) - 1
    with pytest.raises(ValueError, match="out of range"):
        lower([Send(7, 0), Recv(7, 0)], 4)


PLAN: dict[str, Any] = {"dtype": DType.FLOAT32, "op": Op.SUM, "divisor": 1, "codec": 0}
PLAN |= {"layouts": [([0], [4]), ([], []), ([], []), ([], [])], "by_pair": False}
PLAN |= {"descriptor": "one element", "agreement": "one element"}
MESH: dict[str, Any] = {"rank": 0, "names": ["rank 0"], "epoch": 1, "job_key": bytes(32)}
MESH |= {"peers": [], "listeners": [], "n_channels": 1, "staging_bytes": 50 << 20}
MESH |= {"spin_us": 0.0, "backstop_s": 0.1, "resume_s": 10.0, "dead_s": 5.0}


def test_the_native_core_keeps_no_reference_to_a_python_object() -> None:
    """A native thread would take the GIL to drop it, which aborts a program that is ending."""
    program, arena = lower([Finish(0)], 1), Arena.create(1)
    before = [sys.getrefcount(program), sys.getrefcount(arena)]
    plan, mesh = Plan.make(program=program, **PLAN), Mesh.create(arena=arena, **MESH)
    before += [sys.getrefcount(plan), sys.getrefcount(mesh)]
    group, data = mesh.group(1, [0]), memoryview(bytearray(4))
    assert group.post_in_place(plan, 1, address_of(data), 60.0, False, 0).wait(60.0)
    after = [sys.getrefcount(program), sys.getrefcount(arena)]
    assert [*after, sys.getrefcount(plan), sys.getrefcount(mesh)] == before
    mesh.close()


RANKS = [RankInfo("red", "10.0.0.1:1", "a"), RankInfo("blue", "10.0.0.2:1", "b")]


def test_errors_name_the_call_and_a_lost_peers_rank_in_the_group_and_host() -> None:
    native = Fault.PEER_LOST, 1, "was silent for 5.0 s", "all_reduce (call 3)"
    error = error_from(native, [1, 0], RANKS)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.host, error.address) == (0, "blue", "10.0.0.2:1")
    assert "was silent for 5.0 s (all_reduce (call 3))" in str(error)
    assert error_from((Fault.NONE, -1, "", ""), [0, 1], RANKS) is None
    kinds = {Fault.TIMED_OUT: TimedOut, Fault.MISMATCH: UsageError, Fault.CLOSED: Closed}
    for fault, kind in (kinds | {Fault.INTERNAL: InternalError}).items():
        error = error_from((fault, -1, "it broke", "barrier (call 9)"), [0, 1], RANKS)
        text = ("timed out: " if kind is TimedOut else "") + "barrier (call 9): it broke"
        assert (type(error), str(error)) == (kind, text)


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


# Weights of workers and servers, each for one size of group.
WEIGHTED = {"sharded[5*2|3*7]": 8, "sharded[2,0,7,1|3,0,50,1,9]": 9, "sharded[16*0|20*1]": 36}
WEIGHTED |= {"sharded[5*2|3*7].servers": 8, "sharded[5*2|3*7].workers": 5}
NAMES = EVERY + [("all_reduce", name) for name in (*MORE_ALL_REDUCES, *WEIGHTED)]
# The hosts of the ranks.
HOSTS = [(0,) * size for size in (1, 2, 3, 4, 5, 7, 8, 16)]
HOSTS += [(0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 0, 1, 0)]


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_a_step_waits_for_the_steps_of_an_independent_reading(collective: str, name: str) -> None:
    algorithm = find(collective, name)
    for hosts in [range(WEIGHTED[name])] if name in WEIGHTED else HOSTS:
        size = len(hosts)
        for root in {0, size // 2} if algorithm.rooted else {0}:
            schedule = [list(algorithm.steps(rank, size, root, hosts)) for rank in range(size)]
            flow = Dataflow(schedule)
            for rank, steps in enumerate(schedule):
                native = lower(steps, size).waits_for
                first = flow.first_of[rank]
                assert len(native) == len(steps)
                for at, waits in enumerate(native):
                    also = {one - first for one in flow.waits_for[first + at]}
                    assert sorted(set(waits)) == waits
                    # A step that waits for a chunk's readers also waits for the step they read.
                    assert also == {*waits, *(also & {w for one in waits for w in native[one]})}
