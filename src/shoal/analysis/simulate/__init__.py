"""Predicts how long a schedule takes on a cluster."""
