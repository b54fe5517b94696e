"""The attempt that a rank joins, and the ranks that the end of one affects."""

from typing import Any

import pytest
from unit.test_rendezvous_meeting import direct

from shoal.errors import PeerLost, TimedOut, UsageError
from shoal.rendezvous import attempt as attempts
from shoal.rendezvous.attempt import ATTEMPT_KEY, AttemptOverError, decode_end, find_end
from shoal.rendezvous.meeting import MemberMeeting
from shoal.rendezvous.record import Record
from shoal.rendezvous.store import MAX_VALUE_BYTES, MemoryStore

WRONG_KEY = UsageError("rank 1 holds another job key")


def arrive(store: MemoryStore, rank: int, left: int = -1) -> MemberMeeting:
    """Find the attempt and publish, as a process does when it joins or goes on."""
    attempt = attempts.find_attempt(store, rank, f"node-{rank}", left)
    nonce = bytes([attempt.number, rank]) + bytes(14)
    own = Record(3, nonce, "host", f"node-{rank}", "shoal", False)
    meeting = MemberMeeting(direct(store), attempt, rank, own, None)
    meeting.publish(own)
    return meeting


def fail(store: MemoryStore, error: Any = WRONG_KEY, attempt: Any = None, rank: int = 1) -> None:
    attempts.report_failure(direct(store), rank, f"node-{rank}", error, attempt)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_stale_records_of_some_ranks_do_not_delay_a_later_job(first: int) -> None:
    """An earlier job ended before its rank 2 joined."""
    store = MemoryStore()
    arrive(store, 0), arrive(store, 1)
    order = [first, *({0, 1, 2} - {first})]
    meetings = {rank: arrive(store, rank) for rank in order}
    for rank in order:
        if find_end(store, meetings[rank].attempt) is not None:
            with pytest.raises(AttemptOverError):
                meetings[rank].look_around()
            meetings[rank] = arrive(store, rank, left=meetings[rank].attempt)
    assert {each.attempt for each in meetings.values()} == {1}


@pytest.mark.parametrize("last", [None, b"damaged"])
def test_an_attempt_is_found_without_its_number(last: bytes | None) -> None:
    store = MemoryStore()
    for _ in range(3):
        arrive(store, 0)
    store._values.pop(ATTEMPT_KEY)
    if last is not None:
        store.set(ATTEMPT_KEY, last)
    assert arrive(store, 1).attempt == 2


def test_the_number_of_an_attempt_never_decreases() -> None:
    store = MemoryStore()
    for _ in range(3):
        arrive(store, 0)
    before = store.get(ATTEMPT_KEY, 0)
    attempts.meet_again(store, 0, 1, "node-1", "was slow")
    assert store.get(ATTEMPT_KEY, 0) == before


def test_errors_other_than_wrong_calls_are_lost_peers() -> None:
    for error, reason in (
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (MemoryError("no room"), "MemoryError no room"),
        (PeerLost(2, reason="is gone"), "rank 2 is gone"),
        (TimedOut("two\nlines, \x1b[31m in ü"), r"timed out: two lines, .\[31m in \?"),
    ):
        store = MemoryStore()
        first, _ = arrive(store, 0), arrive(store, 1)
        fail(store, error, 0)
        words = f"rank 1 on node-1 has left the meeting: {reason}"
        with pytest.raises(PeerLost, match=words) as caught:
            first.look_around()
        assert (caught.value.rank, caught.value.host) == (1, "node-1")


@pytest.mark.parametrize("was_there", [False, True])
def test_a_rank_that_fails_before_it_publishes_ends_the_attempt_too(was_there: bool) -> None:
    store = MemoryStore()
    if was_there:
        arrive(store, 1)
    first = arrive(store, 0)
    fail(store)
    with pytest.raises(UsageError):
        first.look_around()
    assert arrive(store, 1).attempt == 1


def test_a_rank_that_fails_when_all_meet_again_ends_the_next_attempt() -> None:
    store = MemoryStore()
    first, _ = arrive(store, 0), arrive(store, 1)
    attempts.meet_again(store, 0, 2, "node-2", "was started again")
    with pytest.raises(AttemptOverError):
        first.look_around()
    fail(store, attempt=0)
    with pytest.raises(UsageError, match="holds another job key"):
        arrive(store, 0, left=0)


def test_a_failure_of_a_replaced_process_is_ignored() -> None:
    store = MemoryStore()
    arrive(store, 1), arrive(store, 1)
    fail(store, attempt=0)
    assert find_end(store, 1) is None


def test_the_first_failure_counts() -> None:
    store = MemoryStore()
    fail(store, rank=2, attempt=0)
    fail(store, rank=1, attempt=0)
    end = find_end(store, 0)
    assert end.rank == 2
    assert find_end(store, 1) is None


def test_a_damaged_end_makes_all_meet_again() -> None:
    store = MemoryStore()
    fail(store, UsageError('"' * 10_000), 0)
    value = store.get(attempts.end_key(0), 0)
    assert len(value) <= MAX_VALUE_BYTES
    assert decode_end(value).is_failure
    for at in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[at // 8] ^= 1 << at % 8
        assert not decode_end(bytes(flipped)).is_failure
    arrive(store, 0)
    for other in (b"", b"1", b"[]", store.get(attempts.record_key(1, 0), 0)):
        assert not decode_end(other).is_failure
