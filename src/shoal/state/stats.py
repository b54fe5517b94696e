"""The numbers of a group or a world at one moment: `Group.stats()` and what `shoal top` shows.

Names show the unit: `_s` seconds, `_us` microseconds, `n_bytes` and `bytes_` bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal.state.document import WORDS, world_of

_PATIENCE_S: Final = 0.25  # with a thread that holds the links; a turn takes about a millisecond

_SUMMED: Final = ("n_bytes_out", "n_bytes_in", "bytes_out_per_s", "bytes_in_per_s")


@dataclass(frozen=True)
class Wait:
    """A rank that holds up a call; `in_call`: True if it has joined the call."""

    rank: int
    host: str
    why: str
    since_s: float
    in_call: bool


@dataclass(frozen=True)
class CallStats:
    """A call in flight; `what` names the collective, its type, length and algorithm."""

    group: str | None
    what: str
    n_bytes: int
    age_s: float
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class LinkStats:
    """The link to another rank, with all its connections.

    Args:
        address: of the other rank; empty on the same host.
        kind, state: as docs/dump.md lists.
        bytes_out, bytes_in: of data as sent, such as in mxfp8, without headers, since the world
            formed. The rates cover the last one to two seconds.
        rtt_us: the longest round trip of its TCP connections; None without one.
        n_retransmits: segments that the open connections sent again.
    """

    rank: int
    host: str
    address: str
    kind: str
    state: str
    n_paths_lost: int
    bytes_out: int
    bytes_in: int
    bytes_out_per_s: float
    bytes_in_per_s: float
    rtt_us: float | None
    n_retransmits: int


@dataclass(frozen=True)
class Stats:
    """The numbers of a group. Ranks are the group's own.

    All groups of a world share its links, so links, stalls and busy time are the world's.

    Args:
        world: 16 hexadecimal digits, equal on all ranks.
        is_readable: False: the links are closed, or a stuck thread holds them; lists are empty.
        n_calls: calls begun.
        in_flight: the oldest first.
        counted_s: time since the first `stats()` of the world; with `SHOAL_MONITOR`, since it
            formed.
        busy_s: the part of `counted_s` in which a call was in flight.
        busy_share: the same as a share of the time since the group's last `stats()`; None at first.
        ended: calls and bytes of buffers by collective, in `counted_s`.
        stalls: how often a step could not continue, by cause (docs/dump.md).
    """

    world: str
    name: str
    rank: int
    size: int
    n_hosts: int
    is_readable: bool
    n_calls: int
    in_flight: tuple[CallStats, ...]
    counted_s: float
    busy_s: float
    busy_share: float | None
    ended: Mapping[str, tuple[int, int]]
    links: tuple[LinkStats, ...]
    stalls: Mapping[str, int]


def stats_of(source: Any, group: Any = None, last: Stats | None = None) -> Stats:
    """Return the numbers of one group of a world.

    Args:
        source: the context of the world.
        group: None: all groups of the world.
        last: the earlier stats since which `busy_share` counts.
    """
    mesh = source.mesh
    taken = mesh.state(_PATIENCE_S) if mesh is not None else None
    world = {"groups": [], "peers": []} if taken is None else world_of(source, taken)
    members = range(len(source.names)) if group is None else group.members
    ranks = {member: rank for rank, member in enumerate(members)}
    native_id = None if group is None else group.native_id or 0
    groups = [
        one for one in world["groups"] if native_id is None or int(one["id"], 16) == native_id
    ]
    peers = [peer for peer in world["peers"] if peer["rank"] in ranks and peer["link"] != "none"]
    counted_s, busy_s, counts = source.count().read()
    since_s = counted_s - (0.0 if last is None else last.counted_s)
    ended: dict[str, tuple[int, int]] = {}
    for (group_id, name), (n_calls, n_bytes) in sorted(counts.items(), key=lambda one: one[0][1]):
        if native_id in (None, group_id):
            before = ended.get(name, (0, 0))
            ended[name] = before[0] + n_calls, before[1] + n_bytes
    return Stats(
        world=f"{source.epoch:016x}",
        name="" if group is None else group.name,
        rank=ranks[source.rank],
        size=len(members),
        n_hosts=len({source.names[member].host_id for member in members}),
        is_readable=taken is not None,
        n_calls=sum(one["n_calls"] for one in groups),
        in_flight=_calls(groups, ranks, source.names),
        counted_s=counted_s,
        busy_s=busy_s,
        busy_share=(busy_s - last.busy_s) / since_s if last is not None and since_s > 0 else None,
        ended=ended,
        links=_links(peers, ranks, source.names),
        stalls={
            cause: sum(peer["stalls"][cause] for peer in peers)
            for cause in (peers[0]["stalls"] if peers else ())
        },
    )


def _calls(
    groups: Iterable[Mapping[str, Any]], ranks: Mapping[int, int], names: Sequence[Any]
) -> tuple[CallStats, ...]:
    parts = defaultdict(list)  # of a call that is split over channels
    for group in groups:
        for call in group["in_flight"]:
            parts[group["id"], call["key"]].append((group["name"], call))
    calls = []
    for split in parts.values():
        (name, first), *_ = split
        waits = {
            wait["rank"]: Wait(
                ranks[wait["rank"]],
                names[wait["rank"]].host,
                *(WORDS[wait["why"]], wait["since_s"], wait["in_call"]),
            )
            for _, part in split
            for wait in reversed(part["waits"])  # the longest is first, and stays
            if wait["is_blamed"]
        }
        calls.append(
            CallStats(name, first["what"], first["n_bytes"], first["age_s"], (*waits.values(),))
        )
    return tuple(sorted(calls, key=lambda call: -call.age_s))


def _links(
    peers: Iterable[Mapping[str, Any]], ranks: Mapping[int, int], names: Sequence[Any]
) -> tuple[LinkStats, ...]:
    channels = defaultdict(list)
    for peer in peers:
        channels[peer["rank"]].append(peer)
    links = []
    for rank, parts in channels.items():
        sockets = [socket for part in parts for socket in part["sockets"]]
        total = {name: sum(part[name] for part in parts) for name in _SUMMED}
        links.append(
            LinkStats(
                rank=ranks[rank],
                host=names[rank].host,
                address=names[rank].address,
                kind=parts[0]["link"],
                state=parts[0]["state"],
                n_paths_lost=sum(path["is_lost"] for part in parts for path in part["paths"]),
                bytes_out=total["n_bytes_out"],
                bytes_in=total["n_bytes_in"],
                bytes_out_per_s=total["bytes_out_per_s"],
                bytes_in_per_s=total["bytes_in_per_s"],
                rtt_us=max((socket["rtt_us"] for socket in sockets), default=None),
                n_retransmits=sum(socket["n_retransmits"] for socket in sockets),
            )
        )
    return tuple(sorted(links, key=lambda link: link.rank))
