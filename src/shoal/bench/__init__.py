"""Measuring, side by side: shoal, Gloo and Open MPI in one run, on one machine, with one clock.

`python -m shoal.bench` prints the tables of sections.py. Every library runs as a set of processes
of its own (worker_pool.py, worker.py); the sets take turns, round after round (benchmark.py),
because a machine's speed drifts more than the libraries differ.
"""
