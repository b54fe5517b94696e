"""The names of all environment variables that shoal reads, and a warning about unknown ones.

A new setting takes one line here and a row in docs/settings.md; a test compares both with the
variables that the source reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from shoal.errors import UsageError, did_you_mean
from shoal.limits import MOST_CONNECTIONS

_LOG = logging.getLogger(__name__)

PREFIX: Final = "SHOAL_"

SETTINGS: Final = (
    "SHOAL_ALGO",
    "SHOAL_CHANNELS",
    "SHOAL_DEBUG",
    "SHOAL_DUMP",
    "SHOAL_DUMP_SIGNAL",
    "SHOAL_FUSION_BYTES",
    "SHOAL_HOST_ID",
    "SHOAL_ISA",
    "SHOAL_JOIN",
    "SHOAL_KEY",
    "SHOAL_KEY_FILE",
    "SHOAL_LINK",
    "SHOAL_LOCAL_NCCL",
    "SHOAL_MONITOR",
    "SHOAL_PATHS",
    "SHOAL_PORT_RANGE",
    "SHOAL_RESUME_S",
    "SHOAL_SERVERS",
    "SHOAL_SERVERS_REQUIRED",
    "SHOAL_SOCKET_IFNAME",
    "SHOAL_SPIN_US",
    "SHOAL_STAGING_BYTES",
    "SHOAL_TUNING",
    "SHOAL_TUNING_MISMATCH",
    "SHOAL_WIRE",
)

# For developers of shoal, read by shoal or its tests: accepted, but never suggested.
INTERNAL: Final = ("SHOAL_BACKSTOP_MS", "SHOAL_PROGRAMS", "SHOAL_SEEDS", "SHOAL_SOAK")

# The words that torch accepts in its own variables, in upper or lower case.
_YES: Final = ("1", "y", "yes", "t", "true", "on")
_NO: Final = ("0", "n", "no", "f", "false", "off")

# Names that this process has warned of; a process may form many groups.
_warned: set[str] = set()


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Log a warning for each `SHOAL_` variable that nothing reads, once in a process.

    It names the variables and NOT their values: a value may be a key under a misspelt name.
    """
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in {*SETTINGS, *INTERNAL, *_warned}:
            _warned.add(name)
            advice = did_you_mean(name, SETTINGS) or f"; it reads {', '.join(SETTINGS)}"
            _LOG.warning("%s is set, but shoal does not read it%s", name, advice)


def join_addresses(environ: Mapping[str, str], join: str | None) -> list[str]:
    """Return the addresses in `join`, or in `SHOAL_JOIN` if it is None; empty: form a new group.

    Raises UsageError if it is "1" and MASTER_ADDR or MASTER_PORT is not set.
    """
    join = environ.get("SHOAL_JOIN", "") if join is None else join
    if join != "1":
        return [address.strip() for address in join.split(",") if address.strip()]
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port:
        raise UsageError("SHOAL_JOIN=1 needs MASTER_ADDR and MASTER_PORT, where a member listens")
    return [f"{host}:{port}"]


def local_nccl(environ: Mapping[str, str]) -> bool:
    """Return `SHOAL_LOCAL_NCCL`, True by default; UsageError if it is neither yes nor no."""
    return _is_yes("SHOAL_LOCAL_NCCL", environ.get("SHOAL_LOCAL_NCCL", "") or "yes", "every rank")


def monitored(environ: Mapping[str, str]) -> bool:
    """Return `SHOAL_MONITOR`, False by default; UsageError if it is neither yes nor no."""
    return _is_yes("SHOAL_MONITOR", environ.get("SHOAL_MONITOR", "") or "no", "the ranks to watch")


def n_paths(environ: Mapping[str, str]) -> int:
    """Return `SHOAL_PATHS`, the connections between ranks of two hosts; UsageError if wrong."""
    text = environ.get("SHOAL_PATHS", "") or "1"
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise UsageError(f"SHOAL_PATHS={text!r} is not a number from 1 to {MOST_CONNECTIONS}")
    return int(text)


def _is_yes(name: str, word: str, where: str) -> bool:
    if word.lower() not in (*_YES, *_NO):
        raise UsageError(
            f"{name}={word!r} is neither yes nor no: set it to one of "
            f"{', '.join((*_YES, *_NO))}, on {where}"
        )
    return word.lower() in _YES
