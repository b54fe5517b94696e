"""The project's own tables, with goals: `python -m bench.scoreboard` in the project's folder.

sections.py lists the tables. Every library runs as a separate set of processes, with the rank
program of worker.py; the sets take turns, round after round (benchmark.py), because a machine's
speed drifts more than the libraries differ.
"""
