"""Quantities on the command line: bytes, rates and times, and refused ones."""

import pytest

from shoal.errors import UsageError
from shoal.plan.quantities import bytes_of, bytes_per_us, microseconds
from shoal.plan.text import show_bytes, show_us


def test_quantities_are_read() -> None:
    for read, values in (
        (bytes_of, {"0": 0, "4": 4, "4B": 4, "100MB": 100_000_000, "100MiB": 104_857_600}),
        (bytes_of, {"0.5 KiB": 512, "2kB": 2000, "1GiB": 1 << 30, "64K": 65536, "1g": 1 << 30}),
        (bytes_per_us, {"8Mb": 1, "25Gb": 3125, "25Gbit/s": 3125, "10Gbps": 1250}),
        (bytes_per_us, {"3GB/s": 3000, "400mbit": 50, "1gbit": 125, "8kbit": 0.001}),
        (microseconds, {"20us": 20, "1.5ms": 1500, "500ns": 0.5, "2s": 2e6}),
    ):
        assert {text: read(text) for text in values} == pytest.approx(values)


def test_other_text_is_refused() -> None:
    for read, what, texts in (
        (bytes_of, "bytes", ["", "-1", "4b", "4 parsecs", "1e999B", "nanB", "MiB", "4MiBs"]),
        (bytes_of, "bytes", ["9" * 400]),
        (bytes_per_us, "rate", ["", "25", "25G", "0Gb", "-25Gb", "25GHz", "infGb", "25mb", "1gB"]),
        (microseconds, "time", ["", "20", "-20us", "20 years"]),
    ):
        for text in texts:
            with pytest.raises(UsageError, match=f"cannot read the {what}"):
                read(text)


def test_quantities_are_shown_with_three_digits_in_the_unit_that_suits() -> None:
    n_bytes = {0: "0 B", 4: "4 B", 1023: "1023 B", 1536: "1.50 KiB", 100 << 20: "100 MiB"}
    assert {n: show_bytes(n) for n in n_bytes} == n_bytes
    us = {0: "0 us", 0.25: "0.25 us", 14: "14 us", 1234: "1.23 ms", 999_999: "1.00 s"}
    assert {n: show_us(n) for n in us} == us
