"""The statistics of the calls of one size, defined as nccl-tests defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class CallTimes(NamedTuple):
    """Seconds of calls: their bounds, mean, percentiles, and how far they scatter."""

    min: float
    max: float
    avg: float
    p50: float
    p95: float
    p99: float
    stdev: float

    @property
    def cv_pct(self) -> float:
        """The standard deviation in percent of the mean."""
        return self.stdev / self.avg * 100 if self.avg > 0 else 0.0


def call_times(times_s: Sequence[float]) -> CallTimes:
    """Return the statistics of at least one call.

    A percentile is a time that was measured: the smallest that this percentage of calls does not
    exceed. The median of an even number is the upper one of the two in the middle.
    """
    ordered, n = sorted(times_s), len(times_s)
    avg = math.fsum(ordered) / n
    variance = math.fsum((one - avg) ** 2 for one in ordered) / n

    def at(percent: int) -> float:
        return ordered[min(n - 1, (n * percent + 99) // 100 - 1)]

    return CallTimes(
        min=ordered[0],
        max=ordered[-1],
        avg=avg,
        p50=ordered[n // 2],
        p95=at(95),
        p99=at(99),
        stdev=math.sqrt(variance),
    )
