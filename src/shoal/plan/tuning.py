"""What `shoal tune` measured, and the file that keeps it.

A file is lines of JSON: the first says on which cluster, each other one what one collective took
at one size, in microseconds by algorithm:

    {"shoal_tuning": 1, "hosts": [0, 0, 1, 1], "n_cores": 2}
    {"collective": "all_reduce", "n_bytes": 1024, "us": {"direct": 12.5, "ring": 31.0}}
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shoal.errors import UsageError
from shoal.plan.choose import Choice
from shoal.schedule import find
from shoal.text import show_bytes, show_us

_VERSION: Final = 1
# Between two measured sizes the nearer one counts; further away than this the model chooses.
_REACH: Final = 4


@dataclass(frozen=True)
class Tuning:
    """Measured times of a cluster.

    Args:
        hosts: the host of every rank, numbered in the order in which they first come up.
        n_cores: of each host.
        us: by collective, size in bytes and algorithm: microseconds.
        path: where it was read; for messages.
        digest: of the file's content: ranks compare it; 0 if it is not from a file.
    """

    hosts: tuple[int, ...]
    n_cores: int
    us: Mapping[str, Mapping[int, Mapping[str, float]]]
    path: str = ""
    digest: int = 0
    _nearest: Callable[[str, int], int | None] = field(init=False, repr=False, compare=False)

    def choose(self, collective: str, n_bytes: int) -> Choice | None:
        """The fastest of the measured ones; None if nothing was measured near that size."""
        sizes = self.us.get(collective, {})
        near = [n for n in sizes if n <= n_bytes * _REACH and n_bytes <= n * _REACH]
        if not near:
            return None
        nearest = min(near, key=lambda n: (max(n / n_bytes, n_bytes / n), n))
        times = sizes[nearest]
        ranked = sorted(times, key=lambda name: (times[name], name))
        each = ", ".join(f"{name} {show_us(times[name])}" for name in ranked)
        why = f"measured at {show_bytes(nearest)} over {len(self.hosts)} ranks: {each}"
        return Choice(ranked[0], times[ranked[0]], why)
