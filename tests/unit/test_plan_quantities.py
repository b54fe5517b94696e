"""Quantities on the command line: bytes, rates and times, and what is refused."""

import pytest

from shoal.errors import UsageError
from shoal.plan.quantities import bytes_of, bytes_per_us, microseconds, show_bytes, show_us


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("4", 4),
        ("4B", 4),
        ("100MB", 100_000_000),
        ("100MiB", 104_857_600),
        ("0.5 KiB", 512),
        ("2kB", 2000),
        ("1GiB", 1 << 30),
    ],
)
def test_bytes_are_read_in_1000s_and_1024s(text: str, n_bytes: int) -> None:
    assert bytes_of(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("8Mb", 1.0),
        ("25Gb", 3125.0),
        ("25Gbit/s", 3125.0),
        ("10Gbps", 1250.0),
        ("3GB/s", 3000.0),
        ("400mbit", 50.0),
        ("1gbit", 125.0),
        ("8kbit", 0.001),
    ],
)
def test_a_rate_is_in_bits_or_bytes_a_second(text: str, rate: float) -> None:
    assert bytes_per_us(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "us"), [("20us", 20), ("1.5ms", 1500), ("500ns", 0.5), ("2s", 2e6)]
)
def test_a_time_has_a_unit(text: str, us: float) -> None:
    assert microseconds(text) == pytest.approx(us)


@pytest.mark.parametrize(
    "text", ["", "-1", "4b", "4 parsecs", "1e999B", "nanB", "MiB", "4MiBs", "9" * 400]
)
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the bytes"):
        bytes_of(text)


@pytest.mark.parametrize("text", ["", "25", "25G", "0Gb", "-25Gb", "25GHz", "infGb", "25mb", "1gB"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the rate"):
        bytes_per_us(text)


@pytest.mark.parametrize("text", ["", "20", "-20us", "20 years"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the time"):
        microseconds(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (4, "4 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (100 << 20, "100 MiB")],
)
def test_bytes_are_shown_with_three_digits(n_bytes: int, text: str) -> None:
    assert show_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 us"), (0.25, "0.25 us"), (14, "14 us"), (1234, "1.23 ms"), (999_999, "1.00 s")],
)
def test_times_are_shown_in_the_unit_that_suits(us: float, text: str) -> None:
    assert show_us(us) == text
