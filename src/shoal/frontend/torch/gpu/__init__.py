"""Calls on tensors of GPUs, through host memory and among the GPUs of a host.

The first call on a tensor outside CPU memory loads this package; it starts at `calls`.
"""
