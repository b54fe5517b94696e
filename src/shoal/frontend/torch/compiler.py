"""Keeps torch.compile from compiling shoal.

While a compiled program runs, torch also compiles every Python function that begins, including
functions called by its own C++ code, such as a process group's methods. It cannot compile these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

# NOT `torch.compiler.disable`, which loads the compiler and takes a second.
from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_compiled(kind: _Class) -> _Class:
    """Keep the compiler from the methods of a class and the functions they call. A decorator."""
    frames: Any = eval_frame
    skip = frames._FrameAction.SKIP
    for base in kind.__mro__:
        if not base.__module__.startswith("shoal."):
            continue
        for method in filter(inspect.isfunction, vars(base).values()):
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return kind


def not_compiled_itself(method: Callable[..., Any]) -> None:
    """Keep the compiler from a method, but not from the functions that it calls."""
    frames: Any = eval_frame
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(method.__code__, strategy)


def not_inlined(method: _Method) -> _Method:
    """Let compiled code call a method without compiling it. A decorator."""
    marks: Any = method  # as `torch.compiler.disable` does
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = None
    return method
