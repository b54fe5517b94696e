"""Survivors of a loss go on in the next view: in the same processes, over the same links."""

import contextlib
import functools
import os
import signal
import socket
from typing import Any

import numpy as np
import pytest
from process import arrays
from process.ranks import on_ranks, on_survivors
from process.stage import Stage, die, error_of, on_stage, pretend_hosts, stop

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError
from shoal.group.view import View

check_sum = functools.partial(arrays.check_sum, n_elems=100_003)


def go_on(group: shoal.Group, error: BaseException | None) -> shoal.Group:
    """Shrink, and retry while views end before their first call."""
    while error is not None:
        assert isinstance(error, PeerLost), error
        group = group.shrink(timeout_s=40)
        error = error_of(check_sum, group, 1)
    return group


def die_in_a_call(victims: tuple[int, ...], ranks_per_host: int) -> tuple[Any, ...]:
    """Kill the victims while all reduce; return the survivors' view."""
    pretend_hosts(ranks_per_host)
    stage = Stage.from_environment()
    with shoal.init() as group:
        data, rank = np.ones(4 << 20, np.float32), group.rank
        error = None
        while error is None:
            if rank in victims:
                stage.cue(f"{rank} is busy")
            error = error_of(group.all_reduce, data, "max")
        if rank in victims:  # the second victim may have lost the first one: it is in no next view
            stage.await_cue("never")
        last = go_on(group, error)
        assert last.view.ranks[last.rank] == rank
        gathered = np.empty(last.size, np.int64)
        last.all_gather(gathered, np.array([rank]))
        part = last.subgroup(range(last.size), "part")
        check_sum(last, 2)
        part.barrier()
        return last.view, gathered.tolist(), str(last)


CAST = [
    pytest.param(2, (0,), 2, id="two, all dead but one"),
    pytest.param(2, (1,), 1, id="two hosts, all dead but one"),
    pytest.param(3, (0,), 3, id="three"),
    pytest.param(4, (3, 0), 4, id="four, two deaths"),
    pytest.param(4, (1, 2), 2, id="two hosts, a death on each"),
    pytest.param(8, (0, 5), 3, id="eight on three hosts, two deaths"),
    pytest.param(4, (0, 1, 3), 1, id="four hosts, all dead but one"),
]


@pytest.mark.parametrize(("size", "victims", "ranks_per_host"), CAST)
def test_survivors_of_kills_in_mid_call_go_on_in_one_next_view(
    size: int, victims: tuple[int, ...], ranks_per_host: int
) -> None:
    with on_stage(die_in_a_call, size, victims, ranks_per_host) as (stage, ranks):
        for victim in victims:
            stage.await_cue(f"{victim} is busy")
            os.kill(ranks.pid(victim), signal.SIGKILL)
        found = ranks.survivors(*victims)
    rest = [rank for rank in range(size) if rank not in victims]
    seen = set()
    for view, gathered, name in found:
        seen.add(view)
        assert gathered == rest
        assert f"(view {view.number})" in name
    [view] = seen
    assert view.ranks == tuple(rest)
    assert view.lost == tuple(sorted(victims))
    assert 2 <= view.number <= 1 + len(victims)


@pytest.mark.parametrize("moment", ["0", "1", "2", "3", "5", "agreed"])
@on_survivors(4, (1, 3), has_stage=True)
def test_a_rank_that_dies_while_others_shrink_is_in_no_working_view(moment: str) -> View:
    """Rank 3 is dead, and rank 1 dies at a moment of the following shrink."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        if rank == 3:
            die()
        error = error_of(group.barrier)
        if rank == 1:
            arrange_death(moment)
        last = go_on(group, error)
        stage.cue(f"{rank} is through")
        for other in (0, 2):
            stage.await_cue(f"{other} is through")
        assert last.view.ranks == (0, 2)
        return last.view


def arrange_death(moment: str) -> None:
    """Make this rank kill itself in `shrink`: at its n-th message, or after it agreed."""
    from shoal.group.members import Members
    from shoal.group.shrink import Line

    if moment == "agreed":
        Members._enter = lambda *_: die()
        return
    n_messages, pair = int(moment), Line._pair
    asked: list[int] = []

    def pair_until(line: Line, peer: int) -> Any:
        asked.append(peer)
        if len(asked) > n_messages:
            die()
        return pair(line, peer)

    Line._pair = pair_until


ZOMBIE = 2


def wake_after_the_others_went_on() -> tuple[Any, ...]:
    """Rank 3 dies; rank 2 is stopped before it can shrink, and continues after the others did."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        if rank == 3:
            die()
        errors = [error_of(group.barrier)]
        if rank == ZOMBIE:
            stage.cue("rank 2 has its error")
            stage.await_all(2, "went on")
            # It may read the others' last messages first, and get a view that has ended.
            out = error_of(go_on, group, errors[0])
            errors += [out, error_of(group.barrier)]
            return None, *map(repr, errors), str(out)
        last = go_on(group, errors[0])
        stage.cue(f"rank {rank}: went on")
        for turn in range(20):
            check_sum(last, turn)
        stage.await_cue("the zombie has ended")
        check_sum(last, 20)
        return last.view.ranks, *map(repr, errors)


def test_a_rank_stopped_while_the_others_went_on_is_refused_and_affects_nobody() -> None:
    with on_stage(wake_after_the_others_went_on, 4) as (stage, ranks):
        stage.await_cue("rank 2 has its error")
        stop(ranks.pid(ZOMBIE))
        stage.await_all(2, "went on")
        os.kill(ranks.pid(ZOMBIE), signal.SIGCONT)
        ranks.await_end(ZOMBIE)
        stage.cue("the zombie has ended")
        *others, zombie = ranks.survivors(3, deadline_s=30)
    for view, *_ in others:
        assert view == (0, 1)
    _, first, out, after, text = zombie
    assert first.startswith("PeerLost("), first
    assert out.startswith("PeerLost("), out
    # If it first got a view that had ended, that view has replaced the group.
    assert after.startswith("PeerLost(") or "it was shrunk: use" in after, after
    assert "gave this rank up: this rank was silent for" in text
    assert text.endswith("this rank can only form a new group, with ranks that join it")


# Without reconnecting, the network stays cut.
@pytest.mark.parametrize(("low", "high"), [(0, 2), (1, 3)])
@on_ranks(4, has_stage=True, env={"SHOAL_RESUME_S": "0"})
def test_of_two_ranks_that_lost_each_other_one_goes_on_with_the_rest(low: int, high: int) -> None:
    """Two of four hosts lose each other, and nobody dies."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        group.barrier()  # connects the two
        stage.meet(rank, 4, "connected")
        if rank == high:
            cut(group, low)
        error = None
        while error is None:
            error = error_of(group.barrier)
        assert isinstance(error, PeerLost)
        if rank != high:
            rest = tuple(one for one in range(4) if one != high)
            assert go_on(group, error).view.ranks == rest
            return
        with pytest.raises(PeerLost, match=f"which has lost rank {low}"):
            go_on(group, error)


def cut(group: shoal.Group, peer: int) -> None:
    """Shut every connection of this process to a peer that it dialled, a lower rank."""
    host, port = group._context.names[peer].address.rsplit(":", 1)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.getpeername() == (host, int(port)):
                end.shutdown(socket.SHUT_RDWR)


@on_ranks(3, has_stage=True)
def test_shrink_waits_for_all_and_copies_an_intact_group_and_leaves_out_given_ranks() -> list[str]:
    """Process ids do not change with the view."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        if rank < 2:
            late = error_of(group.shrink, timeout_s=0.3)
            while f"for rank {1 - rank} (" in str(late):  # that rank was slow to call it: retry
                late = error_of(group.shrink, timeout_s=0.3)
            assert isinstance(late, TimedOut)
            assert "for rank 2 (" in str(late)
            assert "to call it too" in str(late)
            check_sum(group.subgroup([0, 1], "meanwhile"), 0)  # the links are unchanged
            stage.cue(f"rank {rank}: waited")
        stage.await_all(2, "waited")
        check_sum(group, 1)
        copy = group.shrink(timeout_s=40)
        assert (copy.view.number, copy.view.ranks, copy.view.lost) == (2, (0, 1, 2), ())
        assert isinstance(error_of(group.barrier), Closed)
        assert group.shrink() is copy
        check_sum(copy, 2)
        assert isinstance(error_of(copy.shrink, [rank]), UsageError)
        assert isinstance(error_of(copy.shrink, [3]), UsageError)

        if rank != 0:
            part = copy.subgroup([2, 1], "part")
            if rank == 2:
                left_out = error_of(part.shrink)
                assert isinstance(left_out, PeerLost)
                assert left_out.rank == 1
                assert "goes on without this rank" in str(left_out)
            else:
                alone = part.shrink([0])
                assert alone.view == View(2, (1,), (0,))
                check_sum(alone.subgroup([0], "one"), 2)
        check_sum(copy, 3)
        last = copy.shrink()
        check_sum(last, 4)
        last.barrier()
        [world] = shoal.dump().state["worlds"]
    assert isinstance(error_of(last.barrier), Closed)  # the with statement has closed it
    ids = [seat["process_id"] for seat in world["ranks"]]
    assert len(set(ids)) == 3
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
    return ids
