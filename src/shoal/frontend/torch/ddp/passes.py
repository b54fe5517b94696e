"""Detects when the current backward pass ends, if it raised, and if it is nested in another."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from types import FrameType

_BACKWARD: Final = torch.autograd.backward.__code__
_GRAD: Final = torch.autograd.grad.__code__


class BackwardPass:
    """The current backward pass.

    Attributes:
        creates_graph: it builds a graph itself.
        is_other: it adds to the gradient of no parameter, as `autograd.grad`.
    """

    def __init__(self) -> None:
        self.creates_graph = self.is_other = False
        self._is_shown = False
        # A weak reference to the callback at the end of the pass. If the pass raises, autograd
        # drops the callback.
        self._end: Callable[[], object] = _no_end

    @property
    def is_under_way(self) -> bool:
        """True from `queue_end` until the pass has ended or raised."""
        return self._end() is not None

    @property
    def is_shown(self) -> bool:
        """True if a hook on an output of the model has noticed the pass, not only a full buffer."""
        return self._is_shown and self.is_under_way

    @property
    def has_raised(self) -> bool:
        """True if the last pass raised before its end."""
        return self._end is not _no_end and self._end() is None

    def look(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Set the attributes for a pass of a model with these parameters that has just begun."""
        if not self.is_under_way:
            self.creates_graph, self.is_other = torch.is_grad_enabled(), _is_other(parameters)

    def queue_end(self, on_end: Callable[[], None], *, shown: bool = False) -> None:
        """Call `on_end` once, when autograd has finished the pass under way; `look` comes first.

        `shown`: an output of the model was reached; without it a full buffer shows the pass.
        """
        if not self.is_under_way:
            self._is_shown = False
            end = functools.partial(self._run, on_end)
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        self._is_shown = self._is_shown or shown

    def forget(self) -> None:
        """Treat the pass under way as ended."""
        self._end = _no_end

    @contextlib.contextmanager
    def stood_in_for(self) -> Iterator[None]:
        """Queue no end within the context; for gradients that are counted outside a pass."""
        self._end = lambda: self
        try:
            yield
        finally:
            self._end = _no_end

    def _run(self, on_end: Callable[[], None]) -> None:
        try:
            on_end()
        finally:
            self._end = _no_end  # NOT earlier: sending the last buffer would queue another end


def _no_end() -> None:
    """Stand for the end of a pass when there is no pass."""


def is_nested() -> bool:
    """Return True if the current backward pass was called within another, which ends later."""
    return len(_passes()) > 1


def _is_other(parameters: Callable[[], Iterable[torch.Tensor]]) -> bool:
    """Return True if the current pass adds to the gradient of none of these leaves."""
    innermost = next(iter(_passes()), None)
    if innermost is None:
        return False
    if innermost.f_code is _GRAD:
        return True
    inputs = innermost.f_locals.get("inputs_tuple")
    if not inputs:
        return False
    own = set(map(id, parameters()))
    # An edge to a leaf points to the node that adds to its gradient.
    leaves = (i if isinstance(i, torch.Tensor) else getattr(i.node, "variable", i) for i in inputs)
    return not any(id(leaf) in own for leaf in leaves)


def _passes() -> list[FrameType]:
    """Return the frames of this thread's backward passes, innermost first.

    Autograd's threads for devices are not Python's. Their pass was called in another thread, whose
    frames follow, unless several threads have passes.
    """
    own = _passes_above(sys._getframe())
    here, threads = threading.get_ident(), threading.enumerate()
    if any(one.ident == here for one in threads if not isinstance(one, threading._DummyThread)):
        return own
    others = [_passes_above(at) for ident, at in sys._current_frames().items() if ident != here]
    calling = [passes for passes in others if passes]
    return own + calling[0] if len(calling) == 1 else own


def _passes_above(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        if frame.f_code is _BACKWARD or frame.f_code is _GRAD:
            found.append(frame)
        frame = frame.f_back
    return found
