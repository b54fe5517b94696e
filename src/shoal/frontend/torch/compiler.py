"""torch.compile must not compile shoal.

While a compiled program runs, torch looks at every Python function that begins and compiles it too;
also those that its own C++ calls, as it calls a process group. It cannot compile these.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

# Part of torch itself: does not load the compiler. `torch.compiler.disable` would, for a second.
from torch._C._dynamo import eval_frame

__all__ = ["not_compiled"]

_Class = TypeVar("_Class", bound=type)


def not_compiled(kind: _Class) -> _Class:
    """Have the compiler leave alone the methods of a class, and what they call. A decorator."""
    frames: Any = eval_frame
    skip = frames._FrameAction.SKIP
    for base in kind.__mro__:
        if not base.__module__.startswith("shoal."):
            continue
        for method in filter(inspect.isfunction, vars(base).values()):
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return kind
