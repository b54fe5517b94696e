"""Turns a store, a rank and a size into a group of connected ranks, without a framework."""

from shoal.rendezvous.attempt import reporting_failure
from shoal.rendezvous.join import join
from shoal.rendezvous.key import job_key
from shoal.rendezvous.membership import Membership
from shoal.rendezvous.options import HostMemory, JoinOptions
from shoal.rendezvous.store import MemoryStore, Store, TorchStore

__all__ = [
    "join",
    "reporting_failure",
    "HostMemory",
    "JoinOptions",
    "Membership",
    "Store",
    "MemoryStore",
    "TorchStore",
    "job_key",
]
