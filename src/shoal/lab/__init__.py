"""Several hosts on one machine, made of network namespaces: a network of any rate to test on."""

from shoal.lab.cluster import Host, Lab

__all__ = ["Lab", "Host"]
