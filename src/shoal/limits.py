"""The constants of the native core. Python imports them and never repeats their values."""

from __future__ import annotations

from shoal._native import (
    BACKSTOP_MS,
    CALLS_REMEMBERED,
    DEAD_S,
    EAGER_BYTES,
    FIRST_NAMED_KEY,
    LAST_FINISHED,
    LOOK_AHEAD,
    MOST_CONNECTIONS,
    MOST_SERVED,
    RESUME_S,
    SEGMENT_BYTES,
    SPIN_US,
    STAGING_BYTES,
)
