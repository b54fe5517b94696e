"""Survivors agree on the next view, whatever dies or parts when, and in whatever order words come.

The ranks of these tests are `Agreement`s, driven as `group.shrink` drives them: a rank tells all
whom it can reach when its report has changed, reads only from those it awaits, and leaves when it
is settled. Every order of deaths, losses, words and calls is gone through.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from shoal.group.view import Agreement, Report, View, decode, n_report_bytes

Heard = tuple[tuple[int, Report], ...]


class Rank(NamedTuple):
    """One rank: in `view` while it works, with its part of the agreement."""

    view: View
    own: Report
    heard: Heard = ()
    is_in_call: bool = False
    is_out: bool = False


class Moment(NamedTuple):
    """All ranks at a time.

    Args:
        ranks: None for one that is dead.
        wires: the words under way, by sender and receiver.
        parted: pairs of ranks that live and whose link is gone, the lower first.
        to_part: those whose link has yet to go.
        stopped: those whom the others give up as their links go, and who work again.
        n_to_die: how many may still die.
    """

    ranks: tuple[Rank | None, ...]
    wires: tuple[tuple[tuple[int, int], tuple[Report, ...]], ...]
    parted: frozenset[tuple[int, int]]
    to_part: frozenset[tuple[int, int]]
    stopped: frozenset[int]
    n_to_die: int


class Part(NamedTuple):
    """What an agreement is after some events, and what its rank may do."""

    own: Report
    heard: Heard
    members: tuple[int, ...]
    awaited: tuple[int, ...]
    reachable: tuple[int, ...]
    is_settled: bool
    is_out: bool


@functools.cache  # few ways to be for one rank, and many for all
def part_of(at: int, size: int, own: Report, heard: Heard, *events: tuple[Any, ...]) -> Part:
    """The part of a rank after events: ("receive", peer, report) calls `receive`."""
    mine = Agreement(at, size)
    mine.own, mine._reports = own, dict(heard)
    for name, *args in events:
        getattr(mine, name)(*args)
    told = tuple(sorted(mine._reports.items()))
    ways = mine.members, mine.awaited, mine.reachable, mine.is_settled, mine.is_out
    return Part(mine.own, told, *ways)


def after(moment: Moment, at: int, *events: tuple[Any, ...]) -> Moment:
    """What is when a rank has taken something in: it tells the others, and leaves if it can."""
    rank = moment.ranks[at]
    assert rank is not None
    part = part_of(at, len(moment.ranks), rank.own, rank.heard, *events)
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
    rank = Rank(view, part.own, part.heard, is_in_call, part.is_out)
    ranks = (*moment.ranks[:at], rank, *moment.ranks[at + 1 :])
    return moment._replace(ranks=ranks, wires=tuple(sorted(wires.items())))


def is_cut(moment: Moment, one: int, other: int) -> bool:
    return (min(one, other), max(one, other)) in moment.parted


def ended(moment: Moment, view: View) -> bool:
    """Whether a view's calls fail: a member is dead, or two have lost each other."""
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
            for peer in part_of(at, len(moment.ranks), rank.own, rank.heard).awaited:
                yield from with_word_of(moment, peer, at)
        elif ended(moment, rank.view):
            ask = ("ask", rank.view.number + 1)
            yield after(moment, at, ask)
            others = (peer for peer in range(len(moment.ranks)) if peer not in rank.own.gone)
            known = [lose for peer in others for lose in losses(moment, at, peer)]
            if known:  # it may have noticed before
                yield after(moment, at, ask, *known)


def with_word_of(moment: Moment, peer: int, at: int) -> Iterator[Moment]:
    """A rank hears the next word of a peer, or that it is lost, also before what it had said."""
    wires = dict(moment.wires)
    words = wires.pop((peer, at), ())
    if words:
        if words[1:]:
            wires[peer, at] = words[1:]
        taken = moment._replace(wires=tuple(sorted(wires.items())))
        yield after(taken, at, ("receive", peer, words[0]))
    for lose in losses(moment, at, peer):
        yield after(moment, at, lose)


def losses(moment: Moment, at: int, peer: int) -> Iterator[tuple[str, int, bool]]:
    """The loss of a peer, if it is lost to this rank."""
    if moment.ranks[peer] is None or is_cut(moment, at, peer):
        yield "lose", peer, at in moment.stopped and peer not in moment.stopped


def without(moment: Moment, victim: int) -> Moment:
    ranks = (*moment.ranks[:victim], None, *moment.ranks[victim + 1 :])
    wires = tuple((ends, words) for ends, words in moment.wires if ends[1] != victim)
    return moment._replace(ranks=ranks, wires=wires, n_to_die=moment.n_to_die - 1)


def begin(
    size: int,
    n_to_die: int,
    parted: frozenset[tuple[int, int]] = frozenset(),
    stopped: frozenset[int] = frozenset(),
) -> Moment:
    """All work in the first view."""
    rank = Rank(View(1, tuple(range(size))), Report(1))
    return Moment((rank,) * size, (), frozenset(), parted, stopped, n_to_die)


def ends_of(moment: Moment) -> set[Moment]:
    """Every moment after which nothing can happen but another death, whichever way it goes.

    On the way no two ranks may hold different views of one number in which calls could succeed.
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
    """The same by chance, where there are too many ways."""
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


@pytest.mark.parametrize(("size", "n_to_die"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_whoever_dies_whenever_all_others_end_up_in_one_view_of_exactly_them(
    size: int, n_to_die: int
) -> None:
    ends = ends_of(begin(size, n_to_die))
    assert {size - len(alive(end)) for end in ends} == set(range(n_to_die + 1))
    for end in ends:
        views = {rank.view for rank in end.ranks if rank is not None}
        assert {view.ranks for view in views} == {alive(end)}
        assert len(views) == 1
        assert not any(rank.is_in_call or rank.is_out for rank in end.ranks if rank is not None)


@pytest.mark.parametrize(
    ("size", "parted", "out"),
    [
        (3, {(0, 1)}, {1}),
        (3, {(1, 2)}, {2}),
        (4, {(0, 3)}, {3}),
        (5, {(0, 1), (2, 3)}, {1, 3}),
    ],
)
def test_of_two_that_lost_each_other_the_higher_is_out_and_knows_it(
    size: int, parted: set[tuple[int, int]], out: set[int]
) -> None:
    rest = tuple(sorted(set(range(size)) - out))
    moment = begin(size, 0, frozenset(parted))
    for end in ends_of(moment) if size < 4 else some_ends_of(moment):
        for at, rank in enumerate(end.ranks):
            assert rank is not None
            assert rank.is_out == (at in out), end
            assert at in out or rank.view.ranks == rest


def check_end(moment: Moment) -> None:
    """Nobody waits, not all are out, and no view holds two that have parted."""
    ranks = list(filter(None, moment.ranks))
    for rank in ranks:
        assert not rank.is_in_call, moment
        assert rank.is_out or not ended(moment, rank.view), moment
    assert not all(rank.is_out for rank in ranks), moment


@pytest.mark.parametrize("parted", [{(0, 1)}, {(1, 2)}, {(0, 1), (0, 2)}])
def test_a_death_while_two_have_parted_leaves_nobody_waiting(parted: set[tuple[int, int]]) -> None:
    for end in ends_of(begin(3, 1, frozenset(parted))):
        check_end(end)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_parts_and_dies_among_more_ranks_nobody_waits(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(4, 6)
    pairs = list(itertools.combinations(range(size), 2))
    parted = frozenset(draw.sample(pairs, draw.randint(1, 3)))
    for end in some_ends_of(begin(size, draw.randint(0, 2), parted), n_walks=4):
        check_end(end)


def test_two_sides_that_cannot_reach_each_other_both_go_on() -> None:
    parted = frozenset({(0, 2), (0, 3), (1, 2), (1, 3)})
    moment = begin(4, 0)._replace(parted=parted)  # at once: nobody could tell who lost whom
    for end in some_ends_of(moment):
        views = [rank.view.ranks for rank in end.ranks if rank is not None]
        assert views == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("size", "stopped"), [(2, {0}), (3, {0}), (3, {2}), (3, {0, 1}), (4, {3}), (5, {0, 1})]
)
def test_ranks_that_were_given_up_are_out_whether_they_come_back_alone_or_together(
    size: int, stopped: set[int]
) -> None:
    rest = tuple(sorted(set(range(size)) - stopped))
    parted = frozenset((min(a, b), max(a, b)) for a in stopped for b in rest)
    moment = begin(size, 0, parted, frozenset(stopped))
    for end in ends_of(moment) if size < 4 else some_ends_of(moment):
        for at, rank in enumerate(end.ranks):
            assert rank is not None
            assert rank.is_out == (at in stopped), end
            assert at in stopped or rank.view.ranks == rest


def test_who_has_not_asked_for_a_view_is_told_by_its_silence() -> None:
    mine = Agreement(0, 4)
    mine.ask(2)
    assert mine.silent == (1, 2, 3)
    mine.receive(1, Report(2))
    mine.lose(3)
    assert mine.silent == (2,)
    mine.receive(2, Report(3))  # it had been in view 2 already
    assert mine.silent == (1,)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1024])
def test_a_report_comes_out_as_it_went_in_and_is_as_long_as_all_others(size: int) -> None:
    last = frozenset({size - 1})
    for report in (Report(1), Report(2**40, last, frozenset(range(size)), last)):
        word = report.encode(size)
        assert len(word) == n_report_bytes(size)
        assert decode(word, size) == report


def test_bytes_that_name_ranks_beyond_the_group_name_nobody() -> None:
    assert decode(b"\xff" * n_report_bytes(3), 3).lost == {0, 1, 2}
