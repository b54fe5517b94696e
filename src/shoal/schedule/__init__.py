"""The schedule language and every algorithm written in it. Standard library only, no I/O.

`COLLECTIVES` says what each collective is, and `ALGORITHMS` how it can be done:
`ALGORITHMS["all_reduce"]["ring"].steps(rank, size)`.
"""

from __future__ import annotations

from shoal.schedule.algorithm import Algorithm
from shoal.schedule.collectives import (
    COLLECTIVES,
    MESSAGE,
    Blocks,
    Collective,
    Contract,
    Place,
    Root,
    Value,
    contract_of,
    row_of,
)
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step
from shoal.schedule.table import ALGORITHMS, MORE_ALL_REDUCES, find

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Blocks",
    "Buffer",
    "COLLECTIVES",
    "Collective",
    "Contract",
    "Copy",
    "Finish",
    "MESSAGE",
    "MORE_ALL_REDUCES",
    "Place",
    "Recv",
    "Root",
    "Send",
    "Step",
    "Value",
    "contract_of",
    "find",
    "row_of",
]
