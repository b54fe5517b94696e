"""The roster: an entry for each rank, sent up and down the tree.

A report (links.py) is a part of the roster: a rank's own entry, then the entries of all ranks below
it. Rank 0's report is the complete roster, and is passed down unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.limits import MOST_CONNECTIONS
from shoal.rendezvous.interface import is_loopback
from shoal.rendezvous.packing import MAX_FIELD_BYTES, Unpacker, field, number, text_field
from shoal.rendezvous.record import MAX_SIZE, Endpoint, unpack_endpoint

MAX_DIGEST_BYTES: Final = MAX_FIELD_BYTES
_N_FIELD: Final = 1 + MAX_FIELD_BYTES
MAX_ENTRY_BYTES: Final = 4 + 3 * _N_FIELD + 1 + MOST_CONNECTIONS * (2 * _N_FIELD + 2)


class Entry(NamedTuple):
    """One rank.

    Args:
        host_id: equal for all ranks of one host, different between hosts.
        host_label: its host's name, for people.
        digest: as passed to `join`.
        listens_at: by path, where other hosts can connect to it; empty in a job on one host.
    """

    host_id: str
    host_label: str
    digest: bytes
    listens_at: tuple[Endpoint, ...] = ()

    def encode(self, rank: int) -> bytes:
        """Return the entry as bytes, for this rank."""
        paths = self.listens_at[:MOST_CONNECTIONS]
        head = number(rank, 4) + text_field(self.host_id) + text_field(self.host_label)
        tail = b"".join(endpoint.pack() for endpoint in paths)
        return head + field(self.digest) + bytes((len(paths),)) + tail


def check_addresses(roster: Mapping[int, Entry]) -> None:
    """Check that no rank listens where other hosts cannot reach it.

    Raises:
        UsageError: some ranks listen on loopback and others do not. All ranks raise the same.
    """
    inside = [rank for rank, one in sorted(roster.items()) if _on_loopback(one)]
    if not inside or all(_on_loopback(one) for one in roster.values() if one.listens_at):
        return
    first = roster[inside[0]]
    at = next(endpoint for endpoint in first.listens_at if is_loopback(endpoint.address))
    more = f" (and {len(inside) - 1} more)" if len(inside) > 1 else ""
    raise UsageError(
        f"rank {inside[0]} on {first.host_label}{more} listens on {at.address} ({at.interface}), "
        "which other hosts cannot reach: set SHOAL_SOCKET_IFNAME on that host to the interface "
        "that the hosts share, or unset it"
    )


def _on_loopback(entry: Entry) -> bool:
    return any(is_loopback(endpoint.address) for endpoint in entry.listens_at)


def decode(body: bytes, ranks: Set[int], least_paths: int = 0) -> dict[int, Entry]:
    """Return the entries of these ranks, each with at least `least_paths` endpoints.

    Raises:
        ValueError: `body` is not exactly one valid entry for each.
    """
    data = Unpacker(body)
    found: dict[int, Entry] = {}
    while not data.is_at_end:
        rank = data.number(4, 0, MAX_SIZE)
        names = data.text(), data.text()
        digest, n_paths = data.field(), data.number(1, least_paths, MOST_CONNECTIONS)
        listens_at = tuple(unpack_endpoint(data) for _ in range(n_paths))
        if rank in found:
            raise ValueError(f"rank {rank} has two entries")
        found[rank] = Entry(*names, digest, listens_at)
    if found.keys() != ranks:
        raise ValueError("the ranks are not the expected ones")
    return found
