"""Parse quantities as people write them: 100MiB, 25Gb, 20us. For commands and variables.

`b` is a bit and `B` a byte; k, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024. A size
that ends in K, M or G alone is of powers of 1024, as nccl-tests has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from shoal.errors import UsageError
from shoal.plan.text import show_bytes

_SCALES: Final = {
    "": 1.0,
    **{prefix: 1000.0**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", 1)},
    "K": 1000.0,
    # as tc writes 400mbit and 1gbit
    **{prefix: 1000.0**power for power, prefix in enumerate("mgt", 2)},
}
_US: Final = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_NUMBER: Final = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"


def bytes_of(text: str) -> int:
    """Return the bytes of "100MiB" or "100M", "100MB", "4B" or "4"; UsageError for other text."""
    found = re.fullmatch(_NUMBER + r"(?:(Ki|Mi|Gi|Ti|[kKMGT]?)B|([kKmMgG]))?\s*", text)
    n_bytes = math.inf
    if found:
        scale = f"{found[3].upper()}i" if found[3] else found[2] or ""
        n_bytes = float(found[1]) * _SCALES[scale]
    if math.isinf(n_bytes):  # for example from several hundred digits
        raise UsageError(f"cannot read the bytes {text!r}: write 4B, 100MB (1000s) or 100MiB")
    return round(n_bytes)


def bytes_in(name: str, text: str) -> int:
    """Return the bytes of the text of an option or a variable; UsageError with its name."""
    try:
        return bytes_of(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def bytes_from(
    environ: Mapping[str, str], name: str, least: int, most: int, otherwise: str
) -> int | None:
    """Return the bytes in a variable; None if unset; UsageError if it is wrong or out of range.

    `otherwise` is the default as a clause, such as "it is 50 MiB", for messages.
    """
    text = environ.get(name, "")
    if not text:
        return None
    n_bytes = bytes_in(name, text)
    if not least <= n_bytes <= most:
        raise UsageError(
            f"{name}={text!r} must be from {show_bytes(least)} to {show_bytes(most)}; by "
            f"default {otherwise}"
        )
    return n_bytes


def bytes_per_us(text: str) -> float:
    """Return the rate of "25Gb" or "25Gbit/s" (bits), "3GB/s" (bytes); UsageError for others."""
    found = re.fullmatch(
        _NUMBER + r"(Ki|Mi|Gi|Ti|[kKMGT]?|[mgt](?=bit))(b|bit|B)(?:/s|ps)?\s*", text
    )
    rate = float(found[1]) * _SCALES[found[2]] if found else 0.0
    if found is None or not 0 < rate < math.inf:
        raise UsageError(f"cannot read the rate {text!r}: write 25Gb (bits) or 3GB (bytes)")
    return rate / (1 if found[3] == "B" else 8) / 1e6


def mbit_in(name: str, text: str) -> float | None:
    """Return the Mbit/s of "400mbit" or "25Gb", None of "none"; UsageError with the name."""
    if text.strip() == "none":
        return None
    try:
        return 8 * bytes_per_us(text)
    except UsageError:
        raise UsageError(
            f"{name}: cannot read the rate {text!r}; write 400mbit or 1gbit, or none for an "
            "unshaped NIC"
        ) from None


def microseconds(text: str) -> float:
    """Return the microseconds of "20us", "1.5ms" or "2s"; UsageError for other text."""
    found = re.fullmatch(_NUMBER + r"(ns|us|ms|s)\s*", text)
    us = float(found[1]) * _US[found[2]] if found else math.inf
    if math.isinf(us):
        raise UsageError(f"cannot read the time {text!r}: write 20us, 1.5ms, 500ns or 2s")
    return us
