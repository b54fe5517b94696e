"""Records, the roll and attempts, with a store in memory."""

import hashlib
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from process.joining import rewritten

from shoal.engine import HANDSHAKE_VERSION
from shoal.errors import PeerLost, TimedOut, UsageError
from shoal.rendezvous import attempt as attempts
from shoal.rendezvous.attempt import Attempt, AttemptOverError, find_end, part_key, record_key
from shoal.rendezvous.meeting import Meeting, MemberMeeting, RootMeeting
from shoal.rendezvous.packing import seal
from shoal.rendezvous.record import Endpoint, Record, decode, find_host_id
from shoal.rendezvous.roll import Roll, decode_part
from shoal.rendezvous.roll import decode as decode_roll
from shoal.rendezvous.store import MAX_VALUE_BYTES, MemoryStore, TorchStore
from shoal.rendezvous.store.asking import Asking

ENDPOINT = Endpoint("10.0.0.2", 4711, "eth0")


def record(rank: int, size: int = 3, **changes: object) -> Record:
    nonce = (rank + 1).to_bytes(2, "little") * 8
    made = Record(size, nonce, "host", f"node-{rank}", f"shoal-{rank}", False)
    return made._replace(**changes)  # type: ignore[arg-type]


def publish(store: MemoryStore, rank: int, what: Record | bytes | None = None) -> None:
    found = what or record(rank)
    store.set(record_key(0, rank), found if isinstance(found, bytes) else found.encode())


def direct(store: MemoryStore) -> Asking:
    """Return the store itself, which needs no thread."""
    store.deadline, store.can_wait = float("inf"), True  # type: ignore[attr-defined]
    return store  # type: ignore[return-value]


def host(store: MemoryStore, own: Record | None = None) -> RootMeeting:
    made = RootMeeting(direct(store), Attempt(), own or record(0), None)
    made.publish(made.own)
    return made


def guest(store: MemoryStore, rank: int, own: Any = None, key: Any = None) -> MemberMeeting:
    made = MemberMeeting(direct(store), Attempt(), rank, own or record(rank), key)
    made.publish(made.own)
    return made


def look(*meetings: Meeting) -> None:
    for meeting in meetings:
        meeting.look(0.0)


def test_malformed_records_parse_to_none() -> None:
    whole = record(0, endpoint=ENDPOINT).encode()
    body = whole[10:-4]
    wrong = [b"", b"\xff", b"null", whole[:-1], whole + b"\0"]
    wrong += [seal(b"shoal/rc", HANDSHAKE_VERSION, body[:n_bytes]) for n_bytes in range(len(body))]
    wrong.append(seal(b"shoal/rc", HANDSHAKE_VERSION, body + b"\0"))
    wrong.append(seal(b"shoal/ro", HANDSHAKE_VERSION, body))
    ends = (Endpoint("some.name", 1, ""), Endpoint("10.0.0.1", 0, ""))
    changes: list[dict[str, Any]] = [{"endpoint": end} for end in ends]
    changes += [{"size": 0}, {"size": 2**31}, {"nonce": b"short"}, {"host_label": "two\nlines"}]
    wrong += [record(0)._replace(**change).encode() for change in changes]
    for value in wrong:
        assert decode(value) is None, value


def roll_of(n_ranks: int, n_hosts: int) -> Roll:
    ids = [f"host {rank % n_hosts}" for rank in range(n_ranks)]
    return Roll.of([record(rank, host_id=ids[rank]) for rank in range(n_ranks)], b"k" * 32)


def parts_of(values: Sequence[bytes], size: int) -> Roll | None:
    parts = [part for value in values if (part := decode_part(value, size)) is not None]
    return decode_roll(parts, size) if parts else None


def test_a_roll_survives_the_store_in_short_parts() -> None:
    for n_ranks, n_hosts, n_parts in ((2, 1, 1), (3, 2, 1), (128, 1, 1), (1024, 512, 8)):
        roll = roll_of(n_ranks, n_hosts)
        values = roll.encode()
        assert len(values) == n_parts
        assert max(map(len, values)) <= 4096
        assert parts_of(values, n_ranks) == roll


def test_a_roll_of_another_group_is_ignored() -> None:
    roll = roll_of(300, 3)
    values, hosts = roll.encode(), 300 * (0,)
    other = roll._replace(key=None, hosts=hosts, leader_names=("a",), labels=("b",)).encode()
    assert len(values) == 2
    assert parts_of(values[:1], 300) is None
    assert parts_of(values[::-1], 300) is None
    assert parts_of([values[0], other[1]], 300) is None
    assert parts_of(values, 299) is None
    assert parts_of(values, 301) is None
    for rank, number in ((0, 1), (7, 3)):  # the first host is 0, and there are 3
        hosts = (*roll.hosts[:rank], number, *roll.hosts[rank + 1 :])
        assert parts_of(roll._replace(hosts=hosts).encode(), 300) is None
    for value in (b"", record(0).encode(), values[0][:-1]):
        assert decode_part(value, 300) is None


def test_the_epoch_is_the_hash_of_all_nonces_in_rank_order() -> None:
    store = MemoryStore()
    first, second = host(store), guest(store, 1)
    guest(store, 2)
    look(first, second)
    digest = hashlib.sha256(b"".join(record(rank).nonce for rank in range(3))).digest()
    assert first.roll.epoch == int.from_bytes(digest[:8], "big")
    assert first.roll == second.roll


def test_a_damaged_roll_or_one_without_this_rank_is_not_used_and_rank_0_is_named() -> None:
    store, size = MemoryStore(), 300
    first = host(store, record(0, size))
    second, third = guest(store, 1, record(1, size)), guest(store, 2, record(2, size))
    for rank in range(3, size):
        publish(store, rank, record(rank, size))
    publish(store, 2, record(2, size, nonce=bytes(16)))
    look(first)
    for part in (0, 1):
        whole = store.get(part_key(0, part), 0)
        store.set(part_key(0, part), b"damaged")
        look(second)
        store.set(part_key(0, part), whole)
        assert second.roll is None
        assert "the roll that it wrote is damaged" in second.oddities[0]
    look(second, third)
    assert second.roll == first.roll
    assert third.roll is None
    assert "without rank 2" in third.oddities[0]


def test_a_rank_with_a_damaged_roll_asks_the_store_at_growing_intervals() -> None:
    store = MemoryStore()
    second, waits = guest(store, 1), []
    store.set(part_key(0, 0), b"damaged")
    for _ in range(7):
        before = time.monotonic()
        look(second)
        waits.append(second.look_at - before)
    floors = [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
    assert all(wait_s >= least_s for wait_s, least_s in zip(waits, floors, strict=True))


def test_torchs_store_is_polled_without_waits() -> None:
    # It has no `wait`: torch writes warnings of one that times out.
    of_torch = SimpleNamespace(check=lambda _keys: False)
    store = Asking(TorchStore(of_torch), time.monotonic() + 60)
    first = RootMeeting(store, Attempt(), record(0), None)
    for meeting in (first, MemberMeeting(store, Attempt(), 1, record(1), None)):
        meeting.look(time.monotonic() + 60)
        assert meeting.roll is None
        assert meeting.look_at < float("inf")
    store.close()


def test_rank_0_reads_all_records_by_one_request_and_others_read_only_the_roll() -> None:
    store, size = MagicMock(wraps=MemoryStore()), 100
    guests = [guest(store, rank, record(rank, size)) for rank in range(1, size)]
    first = host(store, record(0, size))
    look(first)
    [(name, (keys,), _)] = [one for one in store.method_calls if one[0] != "set"]
    assert (name, len(keys)) == ("try_get_all", 99)
    store.reset_mock()
    look(*guests)
    assert store.method_calls == 99 * [call.try_get(part_key(0, 0))]
    assert {each.roll for each in guests} == {first.roll}


def test_a_key_on_one_rank_only_is_refused_by_name() -> None:
    store = MemoryStore()
    publish(store, 0)
    publish(store, 2)
    with pytest.raises(UsageError, match=r"rank 1 was given a job key, rank 0 was not\. SHOAL_KEY"):
        guest(store, 1, record(1, has_own_key=True), b"some key").look_around()
    with pytest.raises(UsageError, match=r"rank 1 was given a job key, rank 0 was not\. SHOAL_KEY"):
        look(host(store))


def test_a_different_version_is_refused_by_number() -> None:
    store = MemoryStore()
    publish(store, 0, seal(b"shoal/rc", 1, b"whatever"))
    words = f"rank 0 speaks version 1.*rank 1 version {HANDSHAKE_VERSION}"
    with pytest.raises(UsageError, match=words):
        guest(store, 1).look_around()
    publish(store, 1, seal(b"shoal/rc", 1, b"whatever"))
    with pytest.raises(UsageError, match="rank 1 speaks version 1"):  # though rank 2 is missing
        look(host(store))


def test_a_host_is_identified_by_itself_unless_the_environment_overrides_it() -> None:
    assert find_host_id({}) == find_host_id({})
    assert find_host_id({"SHOAL_HOST_ID": "a"}) != find_host_id({"SHOAL_HOST_ID": "b"})
    assert find_host_id({"SHOAL_HOST_ID": "a"}) != find_host_id({})
    assert rewritten(record(0).encode(), host_id=find_host_id({"SHOAL_HOST_ID": "ü" * 300}))


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
def test_an_attempts_number_never_decreases_and_need_not_be_stored(last: bytes | None) -> None:
    store = MemoryStore()
    for _ in range(3):
        arrive(store, 0)
    before = store.get(attempts.ATTEMPT_KEY, 0)
    attempts.meet_again(store, 0, 1, "node-1", "was slow")
    assert store.get(attempts.ATTEMPT_KEY, 0) == before
    store._values.pop(attempts.ATTEMPT_KEY)
    if last is not None:
        store.set(attempts.ATTEMPT_KEY, last)
    assert arrive(store, 1).attempt == 2


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


def test_a_failure_of_a_replaced_process_is_ignored_and_of_others_the_first_counts() -> None:
    store = MemoryStore()
    arrive(store, 1), arrive(store, 1)
    fail(store, attempt=0)
    assert find_end(store, 1) is None
    store = MemoryStore()
    fail(store, rank=2, attempt=0)
    fail(store, rank=1, attempt=0)
    assert find_end(store, 0).rank == 2
    assert find_end(store, 1) is None


def test_a_damaged_end_makes_all_meet_again() -> None:
    store = MemoryStore()
    fail(store, UsageError('"' * 10_000), 0)
    value = store.get(attempts.end_key(0), 0)
    assert len(value) <= MAX_VALUE_BYTES
    assert attempts.decode_end(value).is_failure
    for at in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[at // 8] ^= 1 << at % 8
        assert not attempts.decode_end(bytes(flipped)).is_failure
    arrive(store, 0)
    for other in (b"", b"1", b"[]", store.get(attempts.record_key(1, 0), 0)):
        assert not attempts.decode_end(other).is_failure
