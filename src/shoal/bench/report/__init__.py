"""Runs of `shoal bench` as one page and as pictures."""
