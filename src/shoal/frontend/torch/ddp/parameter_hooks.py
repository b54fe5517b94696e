"""Hooks on parameters, called when their gradients are accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    import torch


class ParameterHooks:
    """One hook on each parameter, after those of the program. Removed when this goes."""

    def __init__(self) -> None:
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._handles: list[Any] = []
        self._addresses: list[int] = []  # of torch's tensors that have the hooks
        self._next_id = -1  # of the next hook anywhere, when these were seen to be last
        weakref.finalize(self, _remove, self._handles).atexit = False

    def put(
        self, parameters: Sequence[torch.nn.Parameter], hooks: Sequence[Callable[..., None]]
    ) -> None:
        """Put these hooks in place of those before."""
        self.remove()
        self._parameters = parameters
        self._handles += [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in zip(parameters, hooks, strict=True)
        ]
        self._addresses = [parameter._cdata for parameter in parameters]

    def remove(self) -> None:
        """Remove all hooks."""
        _remove(self._handles)

    def come_last(self) -> None:
        """Move these hooks behind those that others have put since, which change gradients."""
        if self._next_id == RemovableHandle.next_id:
            return  # no hook has been put anywhere
        self._next_id = RemovableHandle.next_id
        for parameter, handle in zip(self._parameters, self._handles, strict=False):
            hooks: Any = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # NOT move_to_end: C++ would not see it

    def note_own(self, n_hooks: int) -> None:
        """Note that the caller has put hooks elsewhere, which change no gradients."""
        self._next_id += n_hooks

    def lost(self, indices: Iterable[int]) -> int | None:
        """The first of these parameters that has lost its hook; None if none has."""
        for index in indices if self._handles else ():
            parameter = self._parameters[index]
            hooks: Any = parameter._post_accumulate_grad_hooks or ()
            is_same = self._addresses[index] == parameter._cdata
            if not is_same or self._handles[index].id not in hooks:
                return index
        return None


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
