"""A group of ranks: its calls, its work, its memory, and what its members agree on."""
