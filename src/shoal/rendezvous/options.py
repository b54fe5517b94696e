"""The arguments of a join besides the store, the rank and the size."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple


class HostMemory(NamedTuple):
    """The memory that the ranks of a host share, made by one of them and entered by all.

    Args:
        make: called on the lowest rank of a host with the number of its ranks, once that is known
            (again in another attempt); also enters the memory. Returns the descriptor to pass to
            the others, borrowed; or -1 to pass none.
        enter: called on each of the others with that descriptor, which it owns from then on, the
            number of ranks and its place among them; again in another attempt. An exception ends
            the join. No rank uses the memory before all have entered.
    """

    make: Callable[[int], int] = lambda _n_local: -1
    enter: Callable[[int, int, int], None] = lambda _fd, _n_local, _local: None


class JoinOptions(NamedTuple):
    """Options of a join; the defaults suit nearly every job.

    Args:
        environ: read instead of `os.environ` for every `SHOAL_` variable and `MASTER_ADDR`.
        pending_s: seconds for a caller's proof. The handshake takes two round trips, under a
            millisecond on a quiet network; two seconds leave room for lost packets and a busy
            process.
        dial_s: seconds for one connection attempt.
        warn_s: seconds until an unfinished join warns of the missing ranks; again after twice, four
            times, eight times as long. Most clusters start all their ranks sooner.
        gone_s: seconds until a warning of a rank that failed before this one joined, since both may
            be starting again.
        log: gets the warnings, and at DEBUG a line per join.
    """

    environ: Mapping[str, str] = os.environ
    pending_s: float = 2.0
    dial_s: float = 5.0
    warn_s: float = 10.0
    gone_s: float = 1.0
    log: logging.Logger = logging.getLogger("shoal")

    @property
    def label(self) -> str:
        """This host's name for messages, at most 255 characters."""
        return socket.gethostname()[:255]
