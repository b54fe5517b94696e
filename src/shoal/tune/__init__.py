"""Measures a cluster, for the planner to read."""
