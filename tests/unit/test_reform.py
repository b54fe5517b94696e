"""`shrink` and `reform` after Ctrl-C, with ranks as threads of this process."""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.in_process import in_ranks, run_well

import shoal
from shoal.errors import UsageError
from shoal.group import growing
from shoal.group.group import Group
from shoal.group.view import View
from shoal.rendezvous.door import Newcomer
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

LONG_S = 60.0


def interrupted_after(call: Callable[..., object]) -> Any:
    def interrupted(*args: Any, **how: Any) -> None:
        call(*args, **how)
        raise KeyboardInterrupt

    return interrupted


def check_sum(group: shoal.Group) -> None:
    data = np.full(3, 1.0 + group.rank)
    group.all_reduce(data)
    np.testing.assert_array_equal(data, np.full(3, group.size * (group.size + 1) / 2))


@in_ranks(2)
def test_shrink_returns_a_view_again_after_an_interrupted_return(group: shoal.Group) -> None:
    view = group.shrink()
    assert group.shrink() is group.reform() is group.grow() is view
    check_sum(view)
    last = view.shrink()
    assert not view._plans  # `group` keeps it alive
    assert group.reform() is group.shrink() is last
    check_sum(last)


@in_ranks(2)
def test_reform_goes_on_from_a_view_that_an_interrupt_ended(group: shoal.Group) -> None:
    group.barrier()
    group.abort("a fault")
    if group.rank == 0:
        group.shrink = interrupted_after(group.shrink)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.reform()
    check_sum(group.reform())


@in_ranks(4)
def test_shrink_excludes_a_rank_from_a_view_that_followed(group: shoal.Group) -> None:
    others = group.shrink([1]) if group.rank != 1 else None
    if others is None:
        return
    assert group.shrink([1]) is others
    if group.rank != 3:
        last = group.shrink([3])  # rank 2 among the others
        assert last.view.ranks == (0, 2)
        check_sum(last)


def exclude_in_a_vote(
    group: shoal.Group, port: int, has_formed: bool, ends: threading.Barrier
) -> Any:
    """Exclude rank 2, which does not vote, while the vote on a new group is open."""
    with contextlib.ExitStack() as open_until_the_end:
        group._vote_number = 2
        if has_formed:
            store = TcpStoreClient("127.0.0.1", port, timeout_s=LONG_S)
            open_until_the_end.enter_context(contextlib.closing(store))
            new = shoal.init(store, group.rank, group.size, timeout_s=LONG_S)
            group._formed = open_until_the_end.enter_context(new)
        open_until_the_end.callback(ends.wait, LONG_S)
        if group.rank == 2:
            return None
        view = group.shrink([2], timeout_s=5)
        check_sum(view)
        return view.view, view.mesh is group.mesh


@pytest.mark.parametrize("has_formed", [False, True])
def test_shrink_excludes_a_rank_that_does_not_vote_on_a_new_group(has_formed: bool) -> None:
    ends = threading.Barrier(3)
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server:
        found = run_well(exclude_in_a_vote, 3, server.port, has_formed, ends)
    number = 2 if has_formed else 3  # of the new group's next view, or of the old one's
    assert found[0] == found[1] == (View(number, (0, 1), (2,)), not has_formed)


@in_ranks(2)
def test_a_view_interrupted_as_it_begins_keeps_the_links_and_the_door(group: shoal.Group) -> None:
    address, enter = group.address, group._enter
    group._enter = interrupted_after(enter)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        group.shrink()
    group._enter = enter  # type: ignore[method-assign]
    view = group.shrink()
    assert view.owns_context
    assert view.address == address
    check_sum(view)


def test_a_move_interrupted_as_it_begins_keeps_the_door() -> None:
    class Old(Group):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_vote_number":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    door, new = object(), SimpleNamespace(abort=lambda _why: None)
    old: Any = object.__new__(Old)
    old._door = door
    with pytest.raises(KeyboardInterrupt):
        old._move_to(new)
    assert old._next is new
    assert new._door is door


@in_ranks(1)
def test_a_with_statement_closes_the_last_of_very_many_groups(group: shoal.Group) -> None:
    view = group
    with group:
        for _ in range(sys.getrecursionlimit()):
            view = view.shrink()
    assert view.mesh is None


@in_ranks(2)
def test_too_many_processes_for_a_door_are_refused_on_all_ranks(group: shoal.Group) -> None:
    waiting = [Newcomer("0" * 32, "host")] * 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "MOST_CLIENTS", 4001)
        with pytest.raises(UsageError, match=r"2000 newcomers: .* 4002 in all; it takes 4001"):
            growing.agree(group, 1, "127.0.0.1:1", waiting, 9.0)
        group.barrier()
