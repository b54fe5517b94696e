"""Measures shoal and Gloo side by side: in one run, on one machine, with one clock.

Every library runs in its own set of processes (worker_pool.py, worker.py); the sets take turns,
round after round (perf.py), because a machine's speed drifts more than the libraries differ.
"""
