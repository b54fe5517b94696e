"""What a join rarely needs to be told."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from shoal.rendezvous.door import Limits


class JoinOptions(NamedTuple):
    """How to join; the defaults are right for nearly everyone.

    Args:
        host_label: this host's name in messages; None takes the host name.
        master_addr: decides the interface; None takes `MASTER_ADDR`, else the store's host.
        environ: read instead of `os.environ` for every `SHOAL_` variable and `MASTER_ADDR`.
        limits: what strangers may cost.
        dial_s: seconds for one connection attempt, until the next one.
        warn_s: seconds until a join that has not ended warns of what it lacks; again after twice,
            four times, eight times as long. Sooner than most clusters start all their ranks would
            be noise.
        gone_s: seconds until it warns of a rank that failed before we came. It may be about to be
            started again, together with us.
        log: takes the warnings, and a line of information per join.
    """

    host_label: str | None = None
    master_addr: str | None = None
    environ: Mapping[str, str] = os.environ
    limits: Limits = Limits()
    dial_s: float = 5.0
    warn_s: float = 10.0
    gone_s: float = 1.0
    log: logging.Logger = logging.getLogger("shoal")

    @property
    def label(self) -> str:
        """This host's name in messages, not too long."""
        return (self.host_label or socket.gethostname())[:255]
