"""Numbers as a report shows them."""

from __future__ import annotations


def show_size(n_bytes: float) -> str:
    """In powers of 1024: 4 B, 16 KiB, 1.5 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} B"


def show_time(time_us: float) -> str:
    """In the unit that suits: 40 us, 1.5 ms, 2 s."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if time_us >= unit * 0.9995:
            return f"{_three_digits(time_us / unit)} {name}"
    return f"{_three_digits(time_us)} us"


def show_rate(bytes_per_s: float) -> str:
    """In powers of 1000: 50 MB/s, 1.2 GB/s."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit * 0.9995:
            return f"{_three_digits(bytes_per_s / unit)} {name}"
    return f"{_three_digits(bytes_per_s)} B/s"


def show_ratio(ratio: float) -> str:
    """A multiple."""
    return f"{ratio:.2f}x"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
