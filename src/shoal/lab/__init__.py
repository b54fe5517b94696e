"""Several hosts on one machine, made of network namespaces: a network of any rate to test on."""

from shoal.lab.cluster import Host, Lab
from shoal.lab.stream import Flow, measure_streams, ring_of

__all__ = ["Lab", "Host", "Flow", "measure_streams", "ring_of"]
