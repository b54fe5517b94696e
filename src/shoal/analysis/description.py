"""Splits an algorithm's docstring into its parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.schedule import Algorithm

FIELDS: Final = ("Cost", "Needs", "Leaves", "Source")
"""The fields of every algorithm's docstring, in this order."""

_SECTION: Final = re.compile(r"^(Args|Raises):\n(\n|    .*\n?)+", re.MULTILINE)
"""Sections for callers of the function only."""
_FIELD: Final = re.compile(rf"^({'|'.join(FIELDS)}):\s+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Description:
    """A docstring, each part of it on one line."""

    summary: str
    remarks: str
    """The text between the summary and the first field; may be empty."""
    fields: Mapping[str, str]
    """The text of each of FIELDS that the docstring has."""


def describe(algorithm: Algorithm) -> Description:
    """Read the docstring that explains an algorithm."""
    text = inspect.getdoc(algorithm.explained_by or algorithm.function) or ""
    text = _SECTION.sub("", text)
    words, *fields = _FIELD.split(text)
    summary, _, remarks = words.partition("\n\n")
    return Description(
        summary=_one_line(summary),
        remarks=_one_line(remarks),
        fields={
            name: _one_line(text) for name, text in zip(fields[::2], fields[1::2], strict=True)
        },
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
