"""Several hosts on one machine: what a network of a given rate does to shoal, without a network."""

from shoal.lab.cluster import Host, Lab
from shoal.lab.stream import Flow, measure_streams, ring_of

__all__ = ["Lab", "Host", "Flow", "measure_streams", "ring_of"]
