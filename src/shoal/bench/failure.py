"""What stands in a table instead of a number."""

from __future__ import annotations

from shoal.errors import ShoalError


class Failure(ShoalError):  # noqa: N818 - says what happened
    """A library has no number here, and why: not installed, crashed, too slow, wrong."""
