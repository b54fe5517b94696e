"""Groups of ranks: their calls, work, buffers and memory, and the agreements of their members."""
