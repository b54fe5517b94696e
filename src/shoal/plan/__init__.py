"""Which algorithm a call takes, and why."""

from shoal.plan.choose import Choice, Topology, choose

__all__ = ["Choice", "Topology", "choose"]
