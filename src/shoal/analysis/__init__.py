"""Other readers of a schedule than the engine: prove, simulate, trace and draw."""
