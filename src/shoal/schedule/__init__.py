"""The schedule language and every algorithm written in it. Standard library only, no I/O.

`COLLECTIVES` defines each collective, and `ALGORITHMS` lists the ways to do it:
`ALGORITHMS["all_reduce"]["ring"].steps(rank, size)`. The first use of an algorithm loads them all,
because a group forms without any: modules loaded to form a group must use `schedule.find` rather
than import `find`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import attributes
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

if TYPE_CHECKING:
    from shoal.schedule.algorithm import Algorithm
    from shoal.schedule.hierarchical import moved
    from shoal.schedule.table import ALGORITHMS, MORE_ALL_REDUCES, find

__getattr__ = attributes(
    __name__,
    {
        "ALGORITHMS": "shoal.schedule.table",
        "Algorithm": "shoal.schedule.algorithm",
        "MORE_ALL_REDUCES": "shoal.schedule.table",
        "find": "shoal.schedule.table",
        "moved": "shoal.schedule.hierarchical",
    },
)

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
    "moved",
    "row_of",
]
