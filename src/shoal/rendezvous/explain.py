"""Says which ranks a join lacks, as far as that can be told, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.rendezvous.links import Links
    from shoal.rendezvous.record import Record
    from shoal.rendezvous.roster import Roster

_N_SHOWN: Final = 16  # of a thousand missing ranks, the first tell as much as all
_ADVICE: Final = "set SHOAL_SOCKET_IFNAME on both hosts to the network they share"


def explain(
    roster: Roster, links: Links, trouble: Mapping[int, str], verdict: str, silence: str
) -> str:
    """One message about every rank that is not linked; asks the store once more if it answers.

    Args:
        trouble: what went wrong last with a rank.
        verdict: what has happened to us, such as "could not join within 5 s".
        silence: says that the store does not answer; empty if it does.
    """
    own = roster.own
    absent = roster.unpublished(asks=not silence)
    met, trouble = _without_guests(links, trouble)
    parts = [silence] if silence else []
    gone = roster.farewell
    if gone is not None and gone.rank not in met:
        parts.append(
            f"rank {gone.rank} on {gone.host_label} failed to join before rank {roster.rank} "
            f"came, and has not been started again: {gone.reason}"
        )
    known = {*roster.oddities, *([] if gone is None else [gone.rank])}
    missing = [rank for rank in absent if rank not in known]
    if missing:
        parts.append(
            f"{_ranks(missing)} never published a record (not started, dead, or using another "
            "store: are MASTER_ADDR, MASTER_PORT and WORLD_SIZE the same on every rank?)"
        )
    parts += [f"rank {rank}: {why}" for rank, why in sorted(roster.oddities.items())]
    unlinked = set(range(own.size)) - met - set(absent) - {roster.rank}
    parts += [_one(roster, rank, trouble.get(rank)) for rank in sorted(unlinked)[:_N_SHOWN]]
    if len(unlinked) > _N_SHOWN:
        parts.append(f"so it is with {len(unlinked) - _N_SHOWN} more ranks")
    if not parts:
        parts.append(f"{_ranks(links.unready())} still lacks links to others, it seems")
    who = f"rank {roster.rank} of {own.size} on {own.host_label}"
    return f"{who} {verdict}: " + "; ".join(parts)


def _without_guests(links: Links, trouble: Mapping[int, str]) -> tuple[set[int], Mapping[int, str]]:
    """The ranks that are not to blame, and what went wrong with the others.

    A guide that lacks one rank introduces nobody, so the other ranks of the host are not to blame.
    """
    met = links.met()
    guide, *others = links.host
    lacked = links.lacked
    if lacked is None or lacked in met:
        return met, trouble
    why = f"it never connected to rank {guide}, which introduces the ranks of this host"
    return met | set(others) - {lacked}, {lacked: why, **trouble}


def _one(roster: Roster, rank: int, trouble: str | None) -> str:
    """What is wrong with one rank that has published."""
    record = roster.record(rank)
    if record is None or roster.epoch is None:
        return f"rank {rank} has published, but was not tried yet"
    where = f"rank {rank} on {record.host_label}"
    if roster.is_local(rank):
        return (
            f"{where}, which is this host, did not link up: {trouble or 'it never connected'} "
            "(if it is another machine, a clone with the same boot id, give each its own "
            "SHOAL_HOST_ID)"
        )
    if rank > roster.rank:
        return f"{where} did not link up: {trouble or _unvisited(roster.own)}"
    if record.endpoint is None:
        return f"{where} does not listen for other hosts yet"
    return (
        f"{where} at {record.endpoint} ({record.endpoint.interface}) could not be reached: "
        f"{trouble or 'no answer'}; {_ADVICE}"
    )


def _unvisited(own: Record) -> str:
    mine = f"{own.endpoint} ({own.endpoint.interface})" if own.endpoint else "this host"
    return f"it never connected to {mine}; {_ADVICE}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _N_SHOWN} more" if len(ranks) > _N_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_N_SHOWN]))}{more}"
