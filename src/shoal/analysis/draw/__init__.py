"""Draws the shape of a schedule."""
