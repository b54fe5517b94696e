"""Other readers of a schedule than the engine: prove, and later simulate, trace and draw."""
