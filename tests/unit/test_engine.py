"""Lowering: the description of a plan, and the dataflow between steps."""

from typing import Any

import pytest

from shoal.dtypes import DType, Op
from shoal.engine import Fault, RankInfo, error_from, lower, plan_for
from shoal.errors import Closed, InternalError, PeerLost, TimedOut, UsageError
from shoal.schedule import ALGORITHMS, Finish, Recv, Send
from shoal.schedule.stripes import STRIPE_FLOOR_BYTES
from shoal.shapes import Shape, agreement, describe

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
