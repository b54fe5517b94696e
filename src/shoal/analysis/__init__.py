"""Analyses of schedules: prove, simulate, trace and draw them."""
