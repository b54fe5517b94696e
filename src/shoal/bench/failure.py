"""The reason that stands in a table instead of a number."""

from __future__ import annotations

from shoal.errors import ShoalError


class Failure(ShoalError):  # noqa: N818 - as a table shows it
    """A library has no number: it is not installed, crashed, is too slow or wrong."""
