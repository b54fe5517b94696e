"""The tree along which ranks connect, and the entries that travel on it."""

import pytest

from shoal.errors import UsageError
from shoal.rendezvous.packing import text_field
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import MAX_ENTRY_BYTES, Entry, check_addresses, decode
from shoal.rendezvous.tree import Tree

SHAPES = [[0], [0, 0, 0], [0, 1], [0, 0, 1, 2, 1], [0, 1, 2, 0, 1, 2, 3], list(range(13))]


@pytest.mark.parametrize("hosts", SHAPES)
def test_only_a_hosts_lowest_rank_is_linked_to_others_and_at_most_three(hosts: list[int]) -> None:
    for rank, host in enumerate(hosts):
        tree = Tree(hosts, rank)
        linked = {*tree.below, *([] if tree.parent is None else [tree.parent])}
        others = [other for other in linked if hosts[other] != host]
        assert len(others) <= (3 if hosts.index(host) == rank else 0)
        assert tree.has_hosts_below == any(other > rank for other in others)


def entry(rank: int) -> Entry:
    paths = tuple(Endpoint(f"10.0.{path}.1", 4000 + rank, f"eth{path}") for path in range(2))
    return Entry("a host", f"node-{rank}", b"settings digest %d" % rank, paths)


def test_the_longest_entry_is_within_the_bound() -> None:
    longest = Endpoint("f" * 300, 65535, "i" * 300)
    made = Entry("h" * 300, "l" * 300, bytes(255), 9 * (longest,))
    assert len(made.encode(2**20)) == MAX_ENTRY_BYTES


WHOLE = entry(1).encode(1) + entry(2).encode(2)
WRONG = {
    "an entry is missing": entry(1).encode(1),
    "one occurs twice": WHOLE + entry(1).encode(1),
    "one is of another rank": WHOLE + entry(3).encode(3),
    "an address is a name": WHOLE.replace(text_field("10.0.0.1"), text_field("some.nam")),
    "a line is broken": WHOLE.replace(b"a host", b"a\nhost"),
    "a text is none": WHOLE.replace(b"a host", b"\xff" * 6),
    "too many paths": Entry("a", "b", b"").encode(1)[:-1] + b"\x09",
}
WRONG |= {f"only {n} bytes": WHOLE[:n] for n in range(len(WHOLE))}


@pytest.mark.parametrize("why", WRONG)
def test_entries_that_do_not_name_each_rank_once_are_refused(why: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - what it says is for messages
        decode(WRONG[why], frozenset({1, 2}))


def test_a_rank_without_an_address_is_refused_among_several_hosts() -> None:
    body = Entry("a", "b", b"").encode(1) + entry(2).encode(2)
    assert len(decode(body, frozenset({1, 2}))) == 2
    with pytest.raises(ValueError):  # noqa: PT011 - what it says is for messages
        decode(body, frozenset({1, 2}), least_paths=1)


def listening(*addresses: str) -> dict[int, Entry]:
    return {
        rank: Entry(f"id {rank}", f"node-{rank}", b"", (Endpoint(address, 4711, "if0"),))
        for rank, address in enumerate(addresses)
    }


def test_a_rank_on_loopback_among_others_that_are_not_is_named_with_its_interface() -> None:
    words = r"rank 1 on node-1 listens on 127\.0\.0\.1 \(if0\), .*SHOAL_SOCKET_IFNAME on that host"
    with pytest.raises(UsageError, match=words):
        check_addresses(listening("10.0.0.1", "127.0.0.1", "10.0.0.3"))


@pytest.mark.parametrize("addresses", [("127.0.0.1", "::1"), ("10.0.0.1", "fd00::2"), ()])
def test_ranks_all_on_loopback_or_all_off_it_are_accepted(addresses: tuple[str, ...]) -> None:
    check_addresses(listening(*addresses))
