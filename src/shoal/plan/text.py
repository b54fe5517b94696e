"""Bytes, times and counts as text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_US: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}


def show_bytes(n_bytes: float) -> str:
    """Return bytes with three digits, in powers of 1024."""
    power = int(min(4, math.log2(n_bytes) / 10)) if n_bytes >= 1024 else 0
    return f"{_three_digits(n_bytes / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def show_us(us: float) -> str:
    """Return a time with three digits, in us, ms or s."""
    unit = next((unit for unit in ("us", "ms") if us < 999.5 * _US[unit]), "s")
    return f"{_three_digits(us / _US[unit])} {unit}"


def counted(n: int, noun: str) -> str:
    """Return a number and its noun: "1 server", "2 servers"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first names, and the number of the others: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def ranks_of(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 1, 2 and 3 more" with the numbers of at most eight."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 8)}"


def _three_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and value < 1000:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f}" if value >= 1 else f"{value:.2f}"
