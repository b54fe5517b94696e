"""Checks the machines of a job before it runs: connections, rates, and differences."""
