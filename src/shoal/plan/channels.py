"""The number of channels between hosts, and the calls that are cut over them.

A channel has its own lock, progress thread and links (docs/threads.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import UsageError
from shoal.limits import MOST_CONNECTIONS
from shoal.schedule import COLLECTIVES

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster

# One thread moves 12 to 18 Gbit/s both ways, with checksums, copies and folds, on a core of 2020
# (bench/LOG.md). A slower link never waits for the thread.
_MBIT_PER_CHANNEL: Final = 12_500
# More than four channels have not been measured.
_MOST_CHOSEN: Final = 4

# Smaller calls use one channel: locks and wake-ups of several cost more than they save, and chunks
# have too few segments to be cut evenly.
LANES_FLOOR_BYTES: Final = 2 << 20


class Channels(NamedTuple):
    """A number of channels, and the reason for it."""

    n: int
    why: str


def channels_from(environ: Mapping[str, str]) -> int:
    """Return `SHOAL_CHANNELS`, 0 if it is not set; UsageError if it is not a number of channels."""
    text = environ.get("SHOAL_CHANNELS", "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise UsageError(f"SHOAL_CHANNELS={text!r} is not a number from 1 to {MOST_CONNECTIONS}")
    return int(text)


def choose_channels(cluster: Cluster, most: int = MOST_CONNECTIONS) -> Channels:
    """Return as many channels as the link keeps busy: up to `most`, one for two cores of a host."""
    if cluster.n_hosts == 1:
        return Channels(1, "all ranks share memory")
    if cluster.n_hosts < cluster.size:
        return Channels(1, "ranks that share a host already have one thread each")
    mbit = 8 / cluster.wire.us_per_byte if cluster.wire.us_per_byte else math.inf
    wanted = math.ceil(min(mbit / _MBIT_PER_CHANNEL, _MOST_CHOSEN))
    if wanted <= 1:
        return Channels(
            1, f"one thread moves {_MBIT_PER_CHANNEL / 1000:g} Gbit/s, and no link is faster"
        )
    n_cores = cluster.n_cores
    n = max(1, min(wanted, n_cores // 2, most))
    why = f"the links would keep {wanted} threads busy"
    if n < wanted:
        cores = (
            f"{n_cores} core{'s' * (n_cores > 1)} of a host leave room for {max(1, n_cores // 2)}"
        )
        why += f", and {cores if n_cores // 2 < most else f'there are connections for {most}'}"
    return Channels(n, why)


class PoolCard(NamedTuple):
    """A worker's or server's facts for the number of channels.

    Args:
        rate: the bytes per microsecond of its link; 0: unknown.
        channels: `SHOAL_CHANNELS`; 0: not set.
        n_paths: `SHOAL_PATHS`.
        n_cores: the cores that its process may use.
    """

    rate: float
    channels: int
    n_paths: int
    n_cores: int


def choose_pool_channels(cards: Sequence[PoolCard], n_workers: int) -> int:
    """Return the number of channels between workers and servers, at most a server's cores.

    A server has no other work; a worker leaves half of its cores to the program.
    """
    workers, servers = cards[:n_workers], cards[n_workers:]
    most = min(card.n_cores for card in servers)
    most = min(most, MOST_CONNECTIONS // max(card.n_paths for card in cards))
    asked = [card.channels for card in cards if card.channels]
    if not asked:
        mbit = 8 * max(card.rate for card in servers)
        asked = [math.ceil(min(mbit / _MBIT_PER_CHANNEL, _MOST_CHOSEN))]
        asked.append(min(card.n_cores for card in workers) // 2)
    return max(1, min(*asked, most))


def n_lanes(collective: str, n_bytes: int, cluster: Cluster, n_channels: int) -> int:
    """Return the channels that a call is cut over, equal on all ranks; `n_bytes` as in `choose`."""
    # Ranks that share memory have one channel to each other.
    if n_channels == 1 or cluster.n_hosts < cluster.size or cluster.size == 1:
        return 1
    # If only two ranks know the length of a block, ranks could disagree on the cut.
    whole = COLLECTIVES[collective].by_pair or n_bytes < LANES_FLOOR_BYTES
    return 1 if whole else n_channels
