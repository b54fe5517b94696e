"""Which algorithm a call takes, and why."""

from shoal.plan.choose import Choice, choose
from shoal.plan.cluster import Cluster, LinkCost, Nic, Nics, numbered
from shoal.plan.defaults import default_cluster
from shoal.plan.planner import Planner
from shoal.plan.served import Served, choose_with_servers
from shoal.plan.settings import Settings
from shoal.plan.wire import reported_mbit

__all__ = [
    "Choice",
    "Cluster",
    "LinkCost",
    "Nic",
    "Planner",
    "Nics",
    "Served",
    "Settings",
    "choose",
    "choose_with_servers",
    "default_cluster",
    "numbered",
    "reported_mbit",
]
