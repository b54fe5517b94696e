"""Records and what follows from them, with a store in memory and time passed in by hand."""

import hashlib
import json

import pytest

from shoal.errors import UsageError
from shoal.rendezvous.record import Endpoint, Record, decode, find_host_id, record_key, seal
from shoal.rendezvous.roster import Roster
from shoal.rendezvous.store import MemoryStore

ENDPOINT = Endpoint("10.0.0.2", 4711, "eth0")


def record(rank: int, size: int = 3, **changes: object) -> Record:
    nonce, key = bytes([rank + 1]) * 16, b"k" * 32 if rank == 0 else None
    made = Record(size, nonce, "host", f"node-{rank}", f"shoal-{rank}", False, key)
    return made._replace(**changes)  # type: ignore[arg-type]


def publish(store: MemoryStore, rank: int, what: Record | bytes | None = None) -> None:
    found = what or record(rank)
    store.set(record_key(rank), found if isinstance(found, bytes) else found.encode())


@pytest.mark.parametrize("endpoint", [None, ENDPOINT, Endpoint("fd00::2", 1, "ib0")])
def test_a_record_survives_the_store(endpoint: Endpoint | None) -> None:
    made = record(0, endpoint=endpoint)
    assert decode(made.encode()) == made
    assert len(made.encode()) < 4096


def test_what_is_no_record_is_none() -> None:
    fields = json.loads(record(0, endpoint=ENDPOINT).encode())
    del fields["crc"]
    wrong = [{**fields, name: value} for name in fields for value in ([], "\n", -1, 1.5)]
    wrong += [{name: fields[name] for name in fields if name != left_out} for left_out in fields]
    wrong += [
        {**fields, "endpoint": {"address": "some.name", "port": 1, "interface": ""}},
        {**fields, "endpoint": {"address": "10.0.0.1", "port": 65536, "interface": ""}},
        {**fields, "more": [{"address": "10.0.0.1", "port": 65536, "interface": ""}]},
        {**fields, "nonce": "00"},
        {**fields, "host_label": "x" * 1000},
    ]
    wrong = [each for each in wrong if each.get("has_own_key") not in ([], "\n", -1, 1.5)]
    wrong.remove(fields)  # with an empty list of further endpoints, as it was
    for value in [
        b"",
        b"\xff",
        b"[" * 100000,
        b"null",
        b"1",
        *(seal(w) for w in wrong),
        json.dumps(fields).encode(),
    ]:
        assert decode(value) is None, value


def test_a_record_with_any_one_bit_flipped_is_none() -> None:
    value = record(0, endpoint=ENDPOINT, card=b"a card").encode()
    for at in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[at // 8] ^= 1 << at % 8
        assert decode(bytes(flipped)) is None, flipped


def test_the_epoch_is_the_hash_of_all_nonces_in_rank_order() -> None:
    store = MemoryStore()
    roster = Roster(store, 1, record(1), None)
    roster.publish(record(1))
    roster.refresh(0.0)
    assert roster.epoch is None
    publish(store, 0)
    publish(store, 2)
    roster.refresh(1.0)
    digest = hashlib.sha256(b"\x01" * 16 + b"\x02" * 16 + b"\x03" * 16).digest()
    assert roster.epoch == int.from_bytes(digest[:8], "big")
    assert roster.job_key == b"k" * 32
    assert roster.read_at == float("inf")
    assert (roster.target(0), roster.remote_ranks()) == ("shoal-0", [])


def test_a_doubted_record_is_read_again_and_changes_the_epoch() -> None:
    store = MemoryStore()
    for rank in range(3):
        publish(store, rank)
    roster = Roster(store, 2, record(2), None)
    roster.refresh(0.0)
    before = roster.epoch
    publish(store, 1, record(1, nonce=b"new" + bytes(13)))
    roster.refresh(1.0)
    assert roster.epoch == before
    roster.doubt([1], 3.0)
    assert roster.read_at == 3.0
    roster.refresh(3.0)
    assert roster.epoch != before


def test_waiting_asks_the_store_less_and_less_often() -> None:
    roster = Roster(MemoryStore(), 0, record(0), None)
    now, gaps = 0.0, []
    for _ in range(10):
        roster.refresh(now)
        gaps.append(roster.read_at - now)
        now = roster.read_at
    assert gaps == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016] + 5 * [0.02])


def test_a_remote_rank_can_be_dialled_once_it_says_where() -> None:
    store = MemoryStore()
    publish(store, 0, record(0, host_id="elsewhere"))
    publish(store, 2)
    roster = Roster(store, 1, record(1), None)
    roster.refresh(0.0)
    assert roster.epoch is not None
    assert roster.target(0) is None
    assert roster.read_at < 1
    publish(store, 0, record(0, host_id="elsewhere", endpoint=ENDPOINT))
    roster.refresh(roster.read_at)
    assert roster.target(0) == ENDPOINT
    assert roster.remote_ranks() == [0]


def test_the_lower_rank_says_how_many_paths_there_are_and_where_each_leads() -> None:
    store = MemoryStore()
    other = Endpoint("10.0.1.1", 4712, "eth1")
    publish(store, 0, record(0, host_id="elsewhere", endpoint=ENDPOINT, more=(other,)))
    publish(store, 2, record(2, host_id="elsewhere", endpoint=ENDPOINT, more=(other, other)))
    roster = Roster(store, 1, record(1, more=()), None)
    roster.refresh(0.0)
    assert (roster.n_connections(0), roster.n_connections(2)) == (2, 1)
    assert [roster.target(0, path) for path in (0, 1)] == [ENDPOINT, other]


def test_a_leftover_of_a_group_of_another_size_is_not_used() -> None:
    store = MemoryStore()
    publish(store, 0, record(0, size=4))
    publish(store, 2)
    roster = Roster(store, 1, record(1), None)
    roster.refresh(0.0)
    assert roster.epoch is None
    assert "group of 4" in roster.oddities[0]
    publish(store, 0)
    roster.refresh(1.0)
    assert roster.epoch is not None
    assert roster.oddities == {}


def test_a_key_on_one_rank_only_is_refused_by_name() -> None:
    store = MemoryStore()
    publish(store, 0)
    publish(store, 2)
    roster = Roster(store, 1, record(1, has_own_key=True), b"some key")
    with pytest.raises(UsageError, match=r"rank 1 was given a job key, rank 0 was not\. SHOAL_KEY"):
        roster.refresh(0.0)


def test_another_version_is_refused_by_number() -> None:
    store = MemoryStore()
    publish(store, 0, b'{"version": 1}')
    publish(store, 2)
    with pytest.raises(UsageError, match=r"rank 0 speaks version 1.* rank 1 version 6"):
        Roster(store, 1, record(1), None).refresh(0.0)


def test_what_is_wrong_with_a_record_shows_also_while_others_are_missing() -> None:
    store = MemoryStore()
    publish(store, 0, b'{"version": 1}')
    roster = Roster(store, 1, record(1), None)
    for _ in range(6):
        roster.refresh(0.0)
    with pytest.raises(UsageError, match="rank 0 speaks version 1"):
        roster.refresh(0.0)


def test_all_records_are_read_by_one_call_of_the_store() -> None:
    store = MemoryStore()
    for rank in range(3):
        publish(store, rank, record(rank, card=b"of rank %d" % rank))
    store.try_get = None  # type: ignore[method-assign, assignment]
    roster = Roster(store, 1, record(1, card=b"of rank 1"), None)
    roster.refresh(0.0)
    assert roster.epoch is not None
    assert roster.cards() == (b"of rank 0", b"of rank 1", b"of rank 2")


def test_a_second_process_of_the_same_rank_is_noticed() -> None:
    store = MemoryStore()
    roster = Roster(store, 1, record(1), None)
    roster.publish(record(1))
    roster.check_own()
    publish(store, 1, record(1, nonce=bytes(16)))
    with pytest.raises(UsageError, match="another process joined as rank 1, on node-1"):
        roster.check_own()


def test_a_host_is_itself_unless_told_otherwise() -> None:
    assert find_host_id({}) == find_host_id({})
    assert find_host_id({"SHOAL_HOST_ID": "a"}) != find_host_id({"SHOAL_HOST_ID": "b"})
    assert find_host_id({"SHOAL_HOST_ID": "a"}) != find_host_id({})
