"""Which algorithm a call takes, and why."""

from shoal.plan.choose import Choice, choose
from shoal.plan.cluster import Cluster, LinkCost, numbered
from shoal.plan.defaults import default_cluster
from shoal.plan.planner import Planner
from shoal.plan.settings import Settings
from shoal.plan.wire import reported_mbit

__all__ = [
    "Choice",
    "Cluster",
    "LinkCost",
    "Planner",
    "Settings",
    "choose",
    "default_cluster",
    "numbered",
    "reported_mbit",
]
