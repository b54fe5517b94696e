"""Checks the machines of a job before it runs: who reaches whom, how fast, and what differs."""
