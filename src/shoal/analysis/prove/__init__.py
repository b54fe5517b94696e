"""Proves that a schedule keeps its contract."""
