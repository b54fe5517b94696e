"""Calls on tensors of GPUs: by way of host memory, and among the GPUs of a host.

Loaded by the first call on a tensor that is not in CPU memory; `calls` is the entrance.
"""
