"""Rendezvous through torch's stores."""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from shoal.rendezvous import TorchStore


def agent_store(host: str, port: int, timeout_s: float) -> TorchStore:
    """Connect to torchrun's own store within `timeout_s`; RuntimeError if that fails.

    Its keys outlive a restart of the workers, so each attempt has its own keys.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return TorchStore(PrefixStore(f"/shoal/attempt_{attempt}", store))
