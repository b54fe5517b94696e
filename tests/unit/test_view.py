"""Survivors agree on the next view in every order of deaths, lost links and messages.

The ranks of these tests are `Agreement`s, driven as by `group.shrink`: a rank sends its report to
all reachable ranks when it changes, reads only from the ranks it awaits, and leaves once it is
settled. The tests try every order of deaths, losses, messages and calls.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from shoal.group.view import Agreement, Report, View, decode, n_report_bytes

Received = tuple[tuple[int, Report], ...]


class Rank(NamedTuple):
    """The state of one rank: its `view`, and its part of the agreement."""

    view: View
    own: Report
    received: Received = ()
    is_in_call: bool = False
    is_out: bool = False


class Moment(NamedTuple):
    """The state of all ranks at one time."""

    ranks: tuple[Rank | None, ...]  # None for a dead rank
    wires: tuple[tuple[tuple[int, int], tuple[Report, ...]], ...]  # by sender and receiver
    parted: frozenset[tuple[int, int]]  # whose link is gone, the lower rank first
    to_part: frozenset[tuple[int, int]]  # whose link will go
    stopped: frozenset[int]  # the others give them up when their links go; they continue later
    n_to_die: int  # how many may still die


class Part(NamedTuple):
    """The state of an agreement after some events, and the next steps of its rank."""

    own: Report
    received: Received
    members: tuple[int, ...]
    awaited: tuple[int, ...]
    reachable: tuple[int, ...]
    is_settled: bool
    is_out: bool


@functools.cache  # one rank has few states, and all together have many
def part_of(at: int, size: int, own: Report, received: Received, *events: tuple[Any, ...]) -> Part:
    """Apply events to a rank's part: ("receive", peer, report) calls `receive`."""
    mine = Agreement(at, size)
    mine.own, mine._reports = own, dict(received)
    for name, *args in events:
        getattr(mine, name)(*args)
    reports = tuple(sorted(mine._reports.items()))
    ways = mine.members, mine.awaited, mine.reachable, mine.is_settled, mine.is_out
    return Part(mine.own, reports, *ways)


def after(moment: Moment, at: int, *events: tuple[Any, ...]) -> Moment:
    """Apply events to a rank, which then sends its report, and leaves if it can."""
    rank = moment.ranks[at]
    part = part_of(at, len(moment.ranks), rank.own, rank.received, *events)
    wires = dict(moment.wires)
    if part.own != rank.own:
        for peer in part.reachable:
            other = moment.ranks[peer]
            if other is not None and at not in other.own.lost and not is_cut(moment, at, peer):
                wires[at, peer] = (*wires.get((at, peer), ()), part.own)
    for peer in part.own.lost:
        wires.pop((peer, at), None)
    view = View(part.own.number, part.members) if part.is_settled else rank.view
    is_in_call = not part.is_settled and not part.is_out
    rank = Rank(view, part.own, part.received, is_in_call, part.is_out)
    ranks = (*moment.ranks[:at], rank, *moment.ranks[at + 1 :])
    return moment._replace(ranks=ranks, wires=tuple(sorted(wires.items())))


def is_cut(moment: Moment, one: int, other: int) -> bool:
    return (min(one, other), max(one, other)) in moment.parted


def ended(moment: Moment, view: View) -> bool:
    """True if a view's calls fail: a member is dead, or two members lost each other."""
    return any(moment.ranks[peer] is None for peer in view.ranks) or any(
        one in view.ranks and other in view.ranks for one, other in moment.parted
    )


def next_moments(moment: Moment) -> Iterator[Moment]:
    for pair in moment.to_part:
        yield moment._replace(parted=moment.parted | {pair}, to_part=moment.to_part - {pair})
    for at, rank in enumerate(moment.ranks):
        if rank is None or rank.is_out:
            continue
        if moment.n_to_die:
            yield without(moment, at)
        if rank.is_in_call:
            for peer in part_of(at, len(moment.ranks), rank.own, rank.received).awaited:
                yield from with_message_of(moment, peer, at)
        elif ended(moment, rank.view):
            ask = ("ask", rank.view.number + 1)
            yield after(moment, at, ask)
            others = (peer for peer in range(len(moment.ranks)) if peer not in rank.own.gone)
            known = [lose for peer in others for lose in losses(moment, at, peer)]
            if known:  # it may have noticed earlier
                yield after(moment, at, ask, *known)


def with_message_of(moment: Moment, peer: int, at: int) -> Iterator[Moment]:
    """A rank receives a peer's next message, or its loss, which may overtake messages."""
    wires = dict(moment.wires)
    messages = wires.pop((peer, at), ())
    if messages:
        if messages[1:]:
            wires[peer, at] = messages[1:]
        taken = moment._replace(wires=tuple(sorted(wires.items())))
        yield after(taken, at, ("receive", peer, messages[0]))
    for lose in losses(moment, at, peer):
        yield after(moment, at, lose)


def losses(moment: Moment, at: int, peer: int) -> Iterator[tuple[str, int, bool]]:
    """Yield the loss of a peer, if this rank has lost it."""
    if moment.ranks[peer] is None or is_cut(moment, at, peer):
        yield "lose", peer, at in moment.stopped and peer not in moment.stopped


def without(moment: Moment, victim: int) -> Moment:
    ranks = (*moment.ranks[:victim], None, *moment.ranks[victim + 1 :])
    wires = tuple((ends, queue) for ends, queue in moment.wires if ends[1] != victim)
    return moment._replace(ranks=ranks, wires=wires, n_to_die=moment.n_to_die - 1)


def begin(size: int, n_to_die: int, parted: Any = (), stopped: Any = ()) -> Moment:
    """Return the state in which all ranks work in the first view."""
    rank = Rank(View(1, tuple(range(size))), Report(1))
    return Moment((rank,) * size, (), frozenset(), frozenset(parted), frozenset(stopped), n_to_die)


def ends_of(moment: Moment) -> set[Moment]:
    """Return every reachable state after which only another death can happen.

    Check on the way that no two ranks hold different usable views with the same number.
    """
    seen, ends, todo = {moment}, set(), [moment]
    while todo:
        now = todo.pop()
        following = set(next_moments(now))
        if all(one.n_to_die < now.n_to_die for one in following):
            ends.add(now)
        todo += following - seen
        seen |= following
        check_views(now)
    return ends


def some_ends_of(moment: Moment, n_walks: int = 20) -> Iterator[Moment]:
    """Yield some of these states from random walks, where there are too many."""
    for seed in range(n_walks):
        draw, now = random.Random(seed), moment
        while following := list(next_moments(now)):
            now = draw.choice(following)
            check_views(now)
        yield now


def check_views(moment: Moment) -> None:
    views = {rank.view for rank in moment.ranks if rank and not ended(moment, rank.view)}
    for one, other in itertools.combinations(views, 2):
        assert one.number != other.number or not set(one.ranks) & set(other.ranks), moment


def alive(moment: Moment) -> tuple[int, ...]:
    return tuple(at for at, rank in enumerate(moment.ranks) if rank is not None)


@pytest.mark.parametrize(("size", "n_to_die"), [(2, 1), (3, 2), (4, 2)])
def test_survivors_of_any_deaths_form_one_view_of_exactly_them(size: int, n_to_die: int) -> None:
    ends = ends_of(begin(size, n_to_die))
    assert {size - len(alive(end)) for end in ends} == set(range(n_to_die + 1))
    for end in ends:
        views = {rank.view for rank in end.ranks if rank is not None}
        assert {view.ranks for view in views} == {alive(end)}
        assert len(views) == 1
        assert not any(rank.is_in_call or rank.is_out for rank in end.ranks if rank is not None)


def test_of_two_parted_ranks_the_higher_is_out() -> None:
    for size, parted in ((3, {(0, 1)}), (3, {(1, 2)}), (4, {(0, 3)}), (5, {(0, 1), (2, 3)})):
        check_out(begin(size, 0, parted), {higher for _, higher in parted})


def check_out(moment: Moment, out: set[int]) -> None:
    """Check that exactly these ranks end up out, and all others in one view."""
    size = len(moment.ranks)
    rest = tuple(sorted(set(range(size)) - out))
    for end in ends_of(moment) if size < 4 else some_ends_of(moment):
        for at, rank in enumerate(end.ranks):
            assert rank.is_out == (at in out), end
            assert at in out or rank.view.ranks == rest


def check_end(moment: Moment) -> None:
    """Check that no rank waits, not all are out, and no view holds two parted ranks."""
    ranks = list(filter(None, moment.ranks))
    for rank in ranks:
        assert not rank.is_in_call, moment
        assert rank.is_out or not ended(moment, rank.view), moment
    assert not all(rank.is_out for rank in ranks), moment


@pytest.mark.parametrize("parted", [{(0, 1)}, {(1, 2)}, {(0, 1), (0, 2)}])
def test_no_rank_waits_after_a_death_while_two_have_parted(parted: set[tuple[int, int]]) -> None:
    for end in ends_of(begin(3, 1, parted)):
        check_end(end)


@pytest.mark.parametrize("seed", range(50))
def test_no_rank_of_a_larger_group_waits_after_any_losses_and_deaths(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(4, 6)
    pairs = list(itertools.combinations(range(size), 2))
    parted = draw.sample(pairs, draw.randint(1, 3))
    for end in some_ends_of(begin(size, draw.randint(0, 2), parted), n_walks=4):
        check_end(end)


def test_two_halves_that_cannot_reach_each_other_both_go_on() -> None:
    parted = frozenset({(0, 2), (0, 3), (1, 2), (1, 3)})
    moment = begin(4, 0)._replace(parted=parted)  # at once: no rank sees others' losses
    for end in some_ends_of(moment):
        views = [rank.view.ranks for rank in end.ranks if rank is not None]
        assert views == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_ranks_that_were_given_up_are_out_when_they_continue() -> None:
    for size, stopped in ((2, {0}), (3, {0}), (3, {2}), (3, {0, 1}), (4, {3}), (5, {0, 1})):
        rest = set(range(size)) - stopped
        parted = {(min(a, b), max(a, b)) for a in stopped for b in rest}
        check_out(begin(size, 0, parted, stopped), stopped)


def test_a_rank_that_has_not_asked_for_a_view_is_silent() -> None:
    mine = Agreement(0, 4)
    mine.ask(2)
    assert mine.silent == (1, 2, 3)
    mine.receive(1, Report(2))
    mine.lose(3)
    assert mine.silent == (2,)
    mine.receive(2, Report(3))  # it was already in view 2
    assert mine.silent == (1,)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1024])
def test_a_report_survives_encoding_and_all_have_one_length(size: int) -> None:
    last = frozenset({size - 1})
    for report in (Report(1), Report(2**40, last, frozenset(range(size)), last)):
        encoded = report.encode(size)
        assert len(encoded) == n_report_bytes(size)
        assert decode(encoded, size) == report


def test_bytes_for_ranks_beyond_the_group_are_ignored() -> None:
    assert decode(b"\xff" * n_report_bytes(3), 3).lost == {0, 1, 2}
