"""Turns a store, a rank and a size into a group whose ranks know each other; no framework."""

from shoal.rendezvous.environment import LaunchInfo, find_place
from shoal.rendezvous.farewell import telling
from shoal.rendezvous.join import join
from shoal.rendezvous.key import job_key, pair_key
from shoal.rendezvous.local_bootstrap import HostMemory
from shoal.rendezvous.membership import Membership, PeerInfo
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.store import MemoryStore, Store, TorchStore
from shoal.rendezvous.store.asking import Caller
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

__all__ = [
    "join",
    "telling",
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
