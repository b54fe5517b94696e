"""torch.compile must not compile shoal.

While a compiled program runs, torch looks at every Python function that begins and compiles it too;
also those that its own C++ calls, as it calls a process group. It cannot compile these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

# Part of torch itself: does not load the compiler. `torch.compiler.disable` would, for a second.
from torch._C._dynamo import eval_frame

__all__ = ["not_compiled", "not_compiled_itself", "not_inlined"]

_Class = TypeVar("_Class", bound=type)
_Method = TypeVar("_Method", bound=Callable[..., Any])


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


def not_compiled_itself(method: Callable[..., Any]) -> None:
    """Have the compiler leave alone a method, but not what it calls."""
    frames: Any = eval_frame
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(method.__code__, strategy)


def not_inlined(method: _Method) -> _Method:
    """Have the compiler call a method from what it compiles, and not look into it. A decorator."""
    marks: Any = method  # as `torch.compiler.disable` would
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = None
    return method
