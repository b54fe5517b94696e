"""Tables for a terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table as Coloured
from rich.text import Text

if TYPE_CHECKING:
    from shoal.average.report.tables import Table


def coloured(tables: Sequence[Table]) -> Any:
    """What rich prints of these tables."""
    parts: list[Any] = []
    for table in tables:
        # Text: a name may have brackets in it, which are rich's own language otherwise.
        shown = Coloured(
            title=Text(table.title),
            title_justify="left",
            box=SIMPLE_HEAD,  # with lines between columns 80 letters would break the words
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
        )
        for place, column in enumerate(table.columns):
            shown.add_column(Text(column), justify="right" if place else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        parts += [shown] if table.rows else [Text(table.title)]
        parts += [Text(remark) for remark in table.remarks]
    return Group(*parts)
