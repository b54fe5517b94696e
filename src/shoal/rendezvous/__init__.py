"""Turns a store, a rank and a size into a group whose ranks know each other; no framework."""

from shoal.rendezvous.attempt import reporting_failure
from shoal.rendezvous.environment import LaunchInfo, find_place
from shoal.rendezvous.join import join
from shoal.rendezvous.key import job_key, pair_key
from shoal.rendezvous.membership import Membership, PeerInfo
from shoal.rendezvous.options import HostMemory, JoinOptions
from shoal.rendezvous.store import MemoryStore, Store, TorchStore
from shoal.rendezvous.store.asking import Caller
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

__all__ = [
    "join",
    "reporting_failure",
    "HostMemory",
    "JoinOptions",
    "Membership",
    "PeerInfo",
    "LaunchInfo",
    "find_place",
    "Store",
    "MemoryStore",
    "TorchStore",
    "Caller",
    "TcpStoreServer",
    "TcpStoreClient",
    "job_key",
    "pair_key",
]
