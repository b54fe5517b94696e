"""Describes the ranks that a join is missing, the likely reasons, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from shoal.rendezvous.interface import names_loopback, within_host

if TYPE_CHECKING:
    from shoal.rendezvous.connections import Connections
    from shoal.rendezvous.links import TreeLinks
    from shoal.rendezvous.meeting import Meeting

_N_SHOWN: Final = 16  # more names of missing ranks would not help
_ADVICE: Final = "set SHOAL_SOCKET_IFNAME on both hosts to the network they share"


def explain(connections: Connections, verdict: str, silence: str) -> str:
    """Return one message about all missing ranks; reads the store once more if it answers.

    Args:
        verdict: this rank's state, such as "could not join within 5 s".
        silence: a sentence that the store does not answer; empty if it does.
    """
    meeting, links = connections.meeting, connections.links
    parts = [silence] if silence else []
    before = meeting.before
    if before is not None and before.is_failure:
        parts.append(
            f"rank {before.rank} on {before.host_label} failed to join before rank {meeting.rank} "
            f"joined, and has not been started again: {before.reason}"
        )
    if meeting.roll is None or links is None:
        parts += _of_no_roll(meeting, asks=not silence)
    elif before is None or not before.is_failure:
        parts += _of_links(connections, links)
    if before is not None and not before.is_failure:
        parts.append(
            f"the attempt before this one ended: rank {before.rank} {before.reason} (a rank that "
            "formed a group in it does not join again until it is started again)"
        )
    who = f"rank {meeting.rank} of {meeting.size} on {meeting.own.host_label}"
    return f"{who} {verdict}: " + "; ".join(parts)


def _of_no_roll(meeting: Meeting, *, asks: bool) -> Iterator[str]:
    """Name the ranks that published no record, or a useless one."""
    absent = meeting.unpublished(asks=asks)
    before = meeting.before
    gone = {before.rank} if before is not None and before.is_failure else set[int]()
    known = gone | meeting.oddities.keys()
    missing = [rank for rank in absent or () if rank not in known]
    if missing:
        yield (
            f"{_ranks(missing)} never published a record (not started, dead, refused for another "
            "job key, or using another store: are MASTER_ADDR, MASTER_PORT and WORLD_SIZE the same "
            "on every rank?)"
        )
        if meeting.store_host and names_loopback(meeting.store_host):
            yield (
                f"{within_host(meeting.store_host)}: if ranks are on several hosts, set "
                "MASTER_ADDR on every rank to an address of rank 0's host that the others can reach"
            )
    yield from (f"rank {rank}: {why}" for rank, why in sorted(meeting.oddities.items()))
    if absent is None and asks:
        yield "rank 0 has not called all ranks, and the store did not show in time who is missing"
    elif not absent and asks:
        yield "rank 0 has not called all ranks, though all have published (stopped, or dead?)"


def _of_links(connections: Connections, links: TreeLinks) -> Iterator[str]:
    """Name ranks of the roll that are not linked, to this rank or to another."""
    meeting, trouble = connections.meeting, connections.trouble
    tree, unlinked = links.tree, links.unlinked()
    for rank in unlinked[:_N_SHOWN]:
        yield _below(meeting, links, rank, trouble.get(rank))
    if len(unlinked) > _N_SHOWN:
        yield f"and {len(unlinked) - _N_SHOWN} more ranks below rank {meeting.rank}"
    other = links.awaited if links.awaits_above else links.kept_waiting_by
    if other is not None and other != meeting.rank and other not in tree.below:
        yield _elsewhere(meeting, links, other)
    elif links.awaits_above and tree.parent is not None:
        yield _above(connections, links, tree.parent)
    elif not unlinked and links.silent():
        yield f"{_ranks(links.silent())} probably still waits for ranks below"
    elif not unlinked:
        yield f"rank {tree.parent} probably still waits for other ranks"


def _above(connections: Connections, links: TreeLinks, rank: int) -> str:
    at, trouble = connections.above_at, connections.trouble.get(rank)
    where = f"rank {rank} on {connections.meeting.label(rank)}"
    if links.tree.is_local(rank) or isinstance(at, str):
        return f"{where}, {_of_this_host(trouble or 'it was not reached yet')}"
    if at is None:
        return f"{where} does not listen for other hosts yet"
    return (
        f"{where} at {at} ({at.interface}) could not be reached: {trouble or 'no answer'}; "
        f"{_ADVICE}"
    )


def _below(meeting: Meeting, links: TreeLinks, rank: int, trouble: str | None) -> str:
    where = f"rank {rank} on {meeting.label(rank)}"
    if links.tree.is_local(rank):
        return f"{where}, {_of_this_host(trouble or 'it never connected')}"
    own = meeting.own.endpoint
    mine = f"{own} ({own.interface})" if own else "this host"
    return f"{where} did not link up: {trouble or f'it never connected to {mine}; {_ADVICE}'}"


def _of_this_host(trouble: str) -> str:
    return (
        f"which is this host, did not link up: {trouble} (if it is another machine, a clone with "
        "the same boot id, give each its own SHOAL_HOST_ID)"
    )


def _elsewhere(meeting: Meeting, links: TreeLinks, rank: int) -> str:
    """Describe a rank that is not linked to another one; the log of that one has more."""
    parent = links.tree.parent_of(rank)
    role = "through which it meets the others"
    if parent is not None and links.tree.is_local(parent) and links.tree.is_local(rank):
        role = "which introduces the ranks of this host"
    return (
        f"rank {rank} on {meeting.label(rank)} did not link up: it never connected to rank "
        f"{parent}, {role}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _N_SHOWN} more" if len(ranks) > _N_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_N_SHOWN]))}{more}"
