"""The planner: the algorithm of each call, and the reason for it."""

from shoal.plan.cluster import Cluster, LinkCost, Nic, Nics, numbered
from shoal.plan.defaults import default_cluster
from shoal.plan.planner import Planner
from shoal.plan.settings import Settings
from shoal.plan.wire import reported_mbit

__all__ = [
    "Cluster",
    "LinkCost",
    "Nic",
    "Planner",
    "Nics",
    "Settings",
    "default_cluster",
    "numbered",
    "reported_mbit",
]
