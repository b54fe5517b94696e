"""Which algorithm a call takes, and why."""

from shoal.plan.agree import agreed_channels, agreed_planner, card_of
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
    "agreed_channels",
    "agreed_planner",
    "card_of",
    "choose",
    "default_cluster",
    "numbered",
    "reported_mbit",
]
