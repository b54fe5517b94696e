"""torch's stores as the place where ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from shoal.rendezvous import TorchStore

__all__ = ["TorchStore", "agent_store"]


def agent_store(host: str, port: int, timeout_s: float) -> TorchStore:
    """Connect to the store of torchrun itself within `timeout_s`, or RuntimeError.

    Its keys outlive a restart of the workers, so each attempt has keys of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return TorchStore(PrefixStore(f"/shoal/attempt_{attempt}", store))
