"""Reduction servers, as the workers see them: a second mesh that takes part of large sums."""
