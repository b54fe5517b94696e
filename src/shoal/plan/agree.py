"""How the ranks of a new group agree on what they choose by.

The cards that they exchange when they meet compare their settings, and where there are several
hosts, one rank of each measures the links between them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import UsageError
from shoal.plan.defaults import default_cluster
from shoal.plan.planner import Planner
from shoal.plan.probe import Measured, measure

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster
    from shoal.plan.ranks import Group
    from shoal.plan.settings import Settings
    from shoal.plan.tuning import Tuning

_LOG: Final = logging.getLogger("shoal")


class _Card(NamedTuple):
    """What each rank lays on the table: what must be alike, and its number of cores."""

    algorithms: int
    tuning: int
    probe: int
    refuse: int
    n_cores: int


_CARD: Final = struct.Struct("<5q")


_VARIABLES: Final = {
    "algorithms": "SHOAL_ALGO",
    "tuning": "the content of SHOAL_TUNING",
    "probe": "SHOAL_PROBE",
    "refuse": "SHOAL_TUNING_MISMATCH",
}

# What was measured between hosts, by topology: a process that forms a group again need not measure
# again.
_MEASURED: Final[dict[tuple[str, ...], Measured]] = {}


def card_of(settings: Settings) -> bytes:
    """What this rank tells all others before the group is there."""
    card = _Card(
        algorithms=_digest(settings.forced.text),
        tuning=settings.tuning.digest if settings.tuning else 0,
        probe=settings.probe,
        refuse=settings.refuse,
        n_cores=len(os.sched_getaffinity(0)),
    )
    return _CARD.pack(*card)


def agreed_planner(
    group: Group,
    settings: Settings,
    host_ids: Sequence[str],
    cards: Sequence[bytes],
    title: str,
) -> Planner:
    """The planner of a new group, the same on every rank.

    Args:
        group: of the same ranks, to measure the links with.
        host_ids: by rank, what tells its host from others.
        cards: by rank, its `card_of`.
        title: whose planner it is, for the log.

    Raises:
        UsageError: the ranks' settings differ, and it names those that do; or the tuning file is
            of another cluster.
        PeerLost, TimedOut: as from any call of the group.
    """
    hosts, topology = group.planner.cluster.hosts, tuple(host_ids)
    read = [_read(rank, card) for rank, card in enumerate(cards)]
    _compare(read)
    cluster = default_cluster(hosts, n_cores=min(card.n_cores for card in read))
    if settings.probe and cluster.n_hosts > 1:
        known = _MEASURED.get(topology)
        codes = _all_codes(group, known.code if known else 0)
        if known is None or any(code != known.code for code in codes):
            known = _MEASURED[topology] = measure(group, hosts)
        cluster = replace(cluster, wire=known.link())
    tuning = _fitting(settings, cluster) if settings.tuning else None
    level = logging.DEBUG if group.rank else logging.INFO
    return Planner(cluster, settings.forced, tuning, title=title, level=level)


def _read(rank: int, card: bytes) -> _Card:
    try:
        return _Card(*_CARD.unpack(card))
    except struct.error as error:
        raise UsageError(
            f"rank {rank} gave a card of {len(card)} bytes, expected {_CARD.size}: install the "
            "same shoal on all hosts"
        ) from error


def _all_codes(group: Group, own: int) -> list[int]:
    """What each rank knows of the links from an earlier group, in short."""
    codes = bytearray(group.size * 8)
    group.all_gather(codes, struct.pack("<q", own))
    return [code for (code,) in struct.iter_unpack("<q", codes)]


def _compare(cards: Sequence[_Card]) -> None:
    for field, variable in _VARIABLES.items():
        values = [getattr(card, field) for card in cards]
        # The rest is wrong, whatever rank 0 has: somebody set the variable for some ranks only.
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            named = ", ".join(map(str, others[:8])) + ", ..." * (len(others) > 8)
            raise UsageError(
                f"{variable} is not the same on all ranks: rank{'s' * (len(others) > 1)} {named} "
                f"differ{'s' * (len(others) == 1)} from rank 0; set it alike on all"
            )


def _fitting(settings: Settings, cluster: Cluster) -> Tuning | None:
    """The tuning file, if it is of this cluster."""
    tuning = settings.tuning
    assert tuning is not None
    difference = tuning.differs_from(cluster.hosts, cluster.n_cores)
    if not difference:
        return tuning
    what = f"the tuning file {tuning.path} is of another cluster: {difference}"
    if settings.refuse:
        raise UsageError(
            f"{what}; measure this one with `shoal tune`, or set SHOAL_TUNING_MISMATCH=ignore "
            "to choose by the model"
        )
    _LOG.warning("%s; it is ignored", what)
    return None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
