"""Several hosts on one machine, made of network namespaces: a test network of any rate."""

from shoal.lab.cluster import Host, Lab

__all__ = ["Lab", "Host"]
