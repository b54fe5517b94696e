"""Measuring, side by side: shoal and Gloo in one run, on one machine, with one clock.

Every library runs as a set of processes of its own (worker_pool.py, worker.py); the sets take
turns, round after round (perf.py), because a machine's speed drifts more than the libraries differ.
"""
