"""Writes the table of frames in wire.md, which the native core keeps: `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shoal._native import frame_rules

PAGE: Final = Path(__file__).parents[1] / "wire.md"
_BEGIN: Final = "<!-- The table below is written by `make docs`. -->\n\n"
_END: Final = "\n<!-- The end of the table. -->"
_LINKS: Final = ("ring", "TCP", "socket")


def table() -> str:
    """Return the frames in the order of their types."""
    rows = ["| type | frame | over | meaning | sent by | leads to |", "|---|---|---|---|---|---|"]
    for number, name, over, _, when, meaning, follows in frame_rules():
        links = ", ".join(link for bit, link in enumerate(_LINKS) if over >> bit & 1)
        rows.append(f"| {number} | {name} | {links} | {meaning} | {when} | {follows} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return wire.md with the current table."""
    head, rest = PAGE.read_text().split(_BEGIN)
    return head + _BEGIN + table() + _END + rest.split(_END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
