"""Whom a farewell concerns: those who had come by then, until the rank that left comes again."""

import pytest

from shoal.errors import PeerLost, TimedOut, UsageError
from shoal.rendezvous.farewell import FAREWELL_KEY, decode_farewell, send_farewell
from shoal.rendezvous.meeting import MemberMeeting
from shoal.rendezvous.record import Record, record_key
from shoal.rendezvous.store import MAX_VALUE_BYTES, MemoryStore
from shoal.rendezvous.store.asking import Asking


def direct(store: MemoryStore) -> Asking:
    """The store itself, which needs no thread."""
    return store  # type: ignore[return-value]


WRONG_KEY = UsageError("rank 1 holds another job key")


def nonce(rank: int, attempt: int) -> bytes:
    return bytes([attempt, rank % 256, rank // 256]) + bytes(13)


def publish(store: MemoryStore, rank: int, attempt: int = 1, size: int = 3) -> MemberMeeting:
    own = Record(size, nonce(rank, attempt), "host", f"node-{rank}", "shoal", False)
    meeting = MemberMeeting(direct(store), own, rank, None)
    meeting.publish(own)
    return meeting


def leave(
    store: MemoryStore,
    error: BaseException = WRONG_KEY,
    *,
    rank: int = 1,
    attempt: int | None = 1,
    size: int = 3,
) -> None:
    own = None if attempt is None else nonce(rank, attempt)
    send_farewell(store, rank, size, own, f"node-{rank}", error)


def test_a_rank_that_had_come_hears_who_left_and_why() -> None:
    store = MemoryStore()
    first, _ = publish(store, 0), publish(store, 1)
    first.look_around()
    leave(store)
    with pytest.raises(UsageError, match=r"rank 1 on node-1 cannot join.*holds another job key"):
        first.look_around()
    assert first.has_lost_one


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (MemoryError("no room"), "MemoryError no room"),
        (PeerLost(2, reason="is gone"), "rank 2 is gone"),
        (TimedOut("two\nlines, \x1b[31m in ü"), r"timed out: two lines, .\[31m in \?"),
    ],
)
def test_what_is_no_mistake_in_a_call_is_a_lost_peer(error: BaseException, words: str) -> None:
    store = MemoryStore()
    first, _ = publish(store, 0), publish(store, 1)
    leave(store, error)
    with pytest.raises(PeerLost, match=f"rank 1 on node-1 has left the meeting: {words}") as caught:
        first.look_around()
    assert (caught.value.rank, caught.value.host) == (1, "node-1")


def test_a_rank_that_comes_later_waits_and_can_say_what_it_found() -> None:
    store = MemoryStore()
    publish(store, 1)
    leave(store)
    first = publish(store, 0)
    first.look_around()
    assert first.farewell is not None
    assert first.farewell.reason == str(WRONG_KEY)
    assert not first.has_lost_one


def test_a_rank_that_was_started_again_is_not_hit_by_what_ended_it() -> None:
    store = MemoryStore()
    publish(store, 0), publish(store, 1)
    leave(store)
    again = publish(store, 0, attempt=2)
    again.look_around()
    assert not again.has_lost_one


def test_the_farewell_of_a_rank_that_was_started_again_counts_no_more() -> None:
    store = MemoryStore()
    first, _ = publish(store, 0), publish(store, 1)
    leave(store)
    again = publish(store, 1, attempt=2)
    for meeting in (first, again):
        meeting.look_around()
        assert meeting.farewell is None


def test_a_rank_that_fails_before_it_has_come_is_heard_too() -> None:
    for leftover in (None, 1):
        store = MemoryStore()
        if leftover is not None:
            publish(store, 1, attempt=leftover)
        first = publish(store, 0)
        leave(store, attempt=None)
        with pytest.raises(UsageError):
            first.look_around()
        publish(store, 1, attempt=2)
        first.look_around()
        assert first.farewell is None


def test_a_process_whose_place_was_taken_says_nothing() -> None:
    store = MemoryStore()
    publish(store, 1, attempt=2)
    leave(store, attempt=1)
    assert store.try_get(FAREWELL_KEY) is None


def test_a_farewell_of_a_group_of_another_size_is_not_ours() -> None:
    store = MemoryStore()
    publish(store, 1, size=4)
    leave(store, size=4)
    first = publish(store, 0)
    first.look_around()
    assert first.farewell is None


@pytest.mark.parametrize("size", [2, 300, 1000])
def test_every_rank_of_a_large_group_that_had_come_hears(size: int) -> None:
    store = MemoryStore()
    publish(store, 1, size=size)
    meetings = [publish(store, rank, size=size) for rank in range(0, size, 7)]
    leave(store, UsageError('"' * 10_000), size=size)
    value = store.get(FAREWELL_KEY, 0)
    assert len(value) <= MAX_VALUE_BYTES
    for meeting in meetings:
        with pytest.raises(UsageError):
            meeting.look_around()
    for rank in range(0, size, 7):
        late = publish(store, rank, attempt=2, size=size)
        late.look_around()


def test_a_damaged_farewell_is_none() -> None:
    store = MemoryStore()
    publish(store, 0)
    leave(store, attempt=None)
    value = store.get(FAREWELL_KEY, 0)
    assert decode_farewell(value) is not None
    for at in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[at // 8] ^= 1 << at % 8
        assert decode_farewell(bytes(flipped)) is None
    for other in (b"", b"1", b"[]", store.get(record_key(0), 0)):
        assert decode_farewell(other) is None


def test_what_is_not_there_any_more_of_our_own_record_is_published_again() -> None:
    store = MemoryStore()
    first = publish(store, 0)
    store.set(record_key(0), b"damaged")
    first.look_around()
    assert store.get(record_key(0), 0) == first.own.encode()
