"""The links between hosts, from sources that are the same in every run of a job.

These are `SHOAL_LINK`, a tuning file, or the rate of the interface that the system reports, in
coarse classes. Nothing is measured when a group forms: a measurement near the edge between two
choices would change the choice, and the bits of sums, from run to run (docs/decisions/0011).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.plan.defaults import DEFAULT_MBIT, LATENCY_US, MESSAGE_US, wire_of
from shoal.plan.quantities import bytes_per_us, microseconds

if TYPE_CHECKING:
    from shoal.plan.cluster import LinkCost

CLASSES_MBIT: Final = (
    *(1_000, 2_500, 5_000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000, 400_000),
)
"""The classes of rates, in Mbit/s."""

# Tunnels and virtual devices without a rate report 10 Mbit/s (tun), 0, or 2^32 - 1.
_LEAST_MBIT: Final = 100
_MOST_MBIT: Final = 10_000_000


def reported_mbit(interface: str, folder: str | os.PathLike[str] = "/sys/class/net") -> int | None:
    """Return the class of the rate that the system reports for an interface; None: no rate.

    Virtio and loopback interfaces report no rate, nor does any interface while its link is down. A
    veth, as in containers, always reports 10 Gbit/s, which counts as no rate. Raises OSError if no
    file descriptor is left.
    """
    where = os.path.join(folder, interface)
    try:
        with open(os.path.join(where, "speed"), encoding="ascii") as file:
            mbit = int(file.read())
        return None if _is_made_up(where) else class_of(mbit)
    except ValueError:
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _is_made_up(where: str) -> bool:
    """Return True for one end of a veth pair: no device, no type, and linked to another."""
    if os.path.exists(os.path.join(where, "device")):
        return False
    found = {}
    for name in ("uevent", "iflink", "ifindex"):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(where, name)) as file:
            found[name] = file.read()
    has_type = "DEVTYPE=" in found.get("uevent", "")  # a vlan has its parent's rate
    return not has_type and found.get("iflink") != found.get("ifindex")


def class_of(mbit: int) -> int | None:
    """Return the fastest class not above a rate, or the slowest class; None: not a rate."""
    if not _LEAST_MBIT <= mbit <= _MOST_MBIT:
        return None
    return max((each for each in CLASSES_MBIT if each <= mbit), default=CLASSES_MBIT[0])


def slowest(reported: Sequence[int | None]) -> tuple[LinkCost, str]:
    """Return the slowest link and its source, from the classes that the ranks' interfaces report.

    An interface without a reported rate counts as the default class.
    """
    rates = [DEFAULT_MBIT if mbit is None else mbit for mbit in reported]
    mbit = min(rates)
    rank = rates.index(mbit)
    if reported[rank] is None:
        why = f"assumed, since the interface of rank {rank} reports no rate; SHOAL_LINK can name it"
    else:
        why = f"reported by the interface of rank {rank}, the slowest"
    return wire_of(mbit), why


def link_of(text: str) -> LinkCost:
    """Read "25Gb", "25Gb,20us" or "25Gb,20us,5us": rate, latency, and a core's time for a message.

    Raises:
        UsageError: the text cannot be read.
    """
    rate, *times = text.split(",")
    if len(times) > 2:
        raise UsageError(f"cannot read the link {text!r}: write RATE,LATENCY,MESSAGE")
    mbit = 8 * bytes_per_us(rate)
    latency_us, message_us = (
        microseconds(times[place]) if place < len(times) else default
        for place, default in enumerate((LATENCY_US, MESSAGE_US))
    )
    return wire_of(mbit, latency_us, message_us)


def link_text(link: LinkCost) -> str:
    """Return the text that `link_of` reads, with three digits."""
    mbit = 8 / link.us_per_byte
    rate = f"{_three(mbit)}Mb" if mbit < 1000 else f"{_three(mbit / 1000)}Gb"
    return f"{rate},{_three(link.latency_us)}us,{_three(link.message_us)}us"


def link_from(environ: Mapping[str, str]) -> LinkCost | None:
    """Read `SHOAL_LINK`, None if it is not set; UsageError if it cannot be read."""
    text = environ.get("SHOAL_LINK", "").strip()
    try:
        return link_of(text) if text else None
    except UsageError as error:
        raise UsageError(f"SHOAL_LINK={text!r}: {error}") from None


def _three(value: float) -> str:
    return f"{float(f'{value:.3g}'):.10g}"
