"""The schedule language and every algorithm written in it. Standard library only, no I/O.

`ALGORITHMS` names all there is: `ALGORITHMS["all_reduce"]["ring"].steps(rank, size)`.
"""

from __future__ import annotations

from shoal.schedule.algorithm import Algorithm
from shoal.schedule.promise import Place, Promise, Value, promise
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step
from shoal.schedule.table import ALGORITHMS, find

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Buffer",
    "Copy",
    "Finish",
    "Place",
    "Promise",
    "Recv",
    "Send",
    "Step",
    "Value",
    "find",
    "promise",
]
