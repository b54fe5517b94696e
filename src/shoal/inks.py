"""Colours and lines of the pictures of `shoal report`, which matplotlib draws.

The colours are those of Okabe and Ito, which people with colour blindness can distinguish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

INKS: Final[Mapping[str, str]] = {
    "ink": "#25282d",
    "soft": "#6d7179",
    "grid": "#dddad4",
    "paper": "#ffffff",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#b8568c",
    "sky": "#56b4e9",
}
STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.parse_math": False,  # a file or a parameter may have dollars in its name
    "axes.edgecolor": INKS["soft"],
    "axes.labelcolor": INKS["ink"],
    "axes.titlecolor": INKS["ink"],
    "axes.facecolor": INKS["paper"],
    "figure.facecolor": INKS["paper"],
    "text.color": INKS["ink"],
    "xtick.color": INKS["soft"],
    "ytick.color": INKS["soft"],
    "xtick.labelcolor": INKS["ink"],
    "ytick.labelcolor": INKS["ink"],
    "grid.color": INKS["grid"],
}
DPI: Final = 180
