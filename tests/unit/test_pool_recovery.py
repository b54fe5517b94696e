"""Recovery: a call whose servers die at any moment ends with the same result on every worker.

The model is one server's part of a call. Its moves are those of the engine, each segment and each
message by itself: the server has all contributions to a segment and folds it; the result lands at a
worker, over its input; a worker that holds all tells the server so; the server, having heard all,
tells each of them; it dies; a worker hears of a death and stops. Every order of them is gone
through. Servers share nothing but the moment at which a worker stops, so what several of them leave
is any combination of what each can leave.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from shoal.group.pool.mend import NOBODY, Repair, replan

INPUT, RESULT = "input", "result"


class Part(NamedTuple):
    """One server's part of a call; sets are bit masks. Of segments, `landed` is by worker."""

    landed: tuple[int, ...]
    folded: int = 0
    told_server: int = 0
    told_worker: int = 0
    stopped: int = 0
    is_dead: bool = False


def moves(part: Part, n_segments: int) -> Iterator[Part]:
    """What can happen next."""
    n_workers, whole = len(part.landed), (1 << n_segments) - 1
    everyone = (1 << n_workers) - 1
    for worker in range(n_workers):
        bit = 1 << worker
        yield part._replace(stopped=part.stopped | bit)
        if part.stopped & bit:
            continue
        # What a server sent before it died may still arrive.
        for segment in range(n_segments):
            if part.folded >> segment & 1:
                landed = list(part.landed)
                landed[worker] |= 1 << segment
                yield part._replace(landed=tuple(landed))
        if part.landed[worker] == whole and not part.is_dead:
            yield part._replace(told_server=part.told_server | bit)
        if part.told_server == everyone:
            yield part._replace(told_worker=part.told_worker | bit)
    if not part.is_dead:
        yield part._replace(is_dead=True)
        for segment in range(n_segments):  # workers that have stopped may have sent theirs before
            yield part._replace(folded=part.folded | 1 << segment)


@cache
def ends(n_workers: int, n_segments: int) -> frozenset[Part]:
    """Every way in which one server can leave the workers, all of which have stopped."""
    todo = [Part((0,) * n_workers)]
    seen = set(todo)
    while todo:
        for after in moves(todo.pop(), n_segments):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return frozenset(part for part in seen if part.stopped == (1 << n_workers) - 1)


def run(repairs: list[Repair], memory: list[list[str]]) -> None:
    """Carry the repairs out, in any order: they touch different segments."""
    touched: set[int] = set()
    for repair in repairs:
        for segment in range(repair.begin, repair.end):
            assert segment not in touched
            touched.add(segment)
            if repair.holder == NOBODY:
                assert all(worker[segment] == INPUT for worker in memory), "an input is gone"
            else:
                assert memory[repair.holder][segment] == RESULT, "the holder has no result"
            for worker in memory:
                worker[segment] = RESULT


def bitmap(bits: int, n_segments: int) -> bytes:
    return bits.to_bytes((n_segments + 7) // 8, "little")


@pytest.mark.parametrize("n_segments", [1, 2, 3])
@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_whatever_a_dead_server_leaves_every_worker_gets_every_result(
    n_workers: int, n_segments: int
) -> None:
    if n_workers == 4 and n_segments == 3:
        n_segments = 2  # a million states more, and nothing new in them
    found = {part.landed for part in ends(n_workers, n_segments)}
    assert (0,) * n_workers in found
    for landed in found:
        memory = [
            [RESULT if bits >> segment & 1 else INPUT for segment in range(n_segments)]
            for bits in landed
        ]
        repairs = replan([[bitmap(bits, n_segments)] for bits in landed], [n_segments])
        run(repairs, memory)
        assert memory == [[RESULT] * n_segments] * n_workers


@pytest.mark.parametrize("n_servers", [1, 2, 3])
@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_a_call_that_has_succeeded_anywhere_is_whole_everywhere(
    n_workers: int, n_servers: int
) -> None:
    # One or two of the servers die; a third, and what it had done, may be cut off with them.
    whole = (1 << 2) - 1
    kinds = {
        (part.told_worker, all(bits == whole for bits in part.landed), part.is_dead)
        for part in ends(n_workers, 2)
    }
    n_cases = n_successes = 0
    for parts in itertools.combinations_with_replacement(sorted(kinds), n_servers):
        if not 1 <= sum(is_dead for _, _, is_dead in parts) <= 2:
            continue
        n_cases += 1
        succeeded = (1 << n_workers) - 1
        for told, _, _ in parts:
            succeeded &= told
        if succeeded:
            n_successes += 1
            assert all(is_whole for _, is_whole, _ in parts)
    assert n_successes > 0
    assert n_cases > n_successes


def test_without_the_second_telling_a_call_could_succeed_that_is_not_whole() -> None:
    # The reason for it: a worker that holds everything may be the only one.
    assert any(part.landed == (3, 0) for part in ends(2, 2))


def test_the_lowest_holder_gives_and_runs_are_as_long_as_they_can_be() -> None:
    landed = [[bytes([0b0011_0000, 0b01])], [bytes([0b0011_1100, 0b01])]]
    assert replan(landed, [10]) == [
        Repair(0, 0, 2, NOBODY),
        Repair(0, 2, 4, 1),
        Repair(0, 6, 8, NOBODY),
        Repair(0, 9, 10, NOBODY),
    ]


def test_bits_beyond_the_end_of_a_chunk_mean_nothing() -> None:
    assert replan([[b"\xff"], [b"\xfe"]], [3]) == [Repair(0, 0, 1, 0)]


def test_each_chunk_is_mended_by_itself_and_empty_ones_not_at_all() -> None:
    nothing = [[b"\0", b"", b"\1"]] * 2
    assert replan(nothing, [2, 0, 1]) == [Repair(0, 0, 2, NOBODY)]
