"""Hooks on a program's parameters, and a check for new parameters; neither keeps objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    import torch


class ParameterHooks:
    """One hook on each parameter, after the program's hooks. Deletion removes the hooks."""

    def __init__(self) -> None:
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._handles: list[Any] = []
        self._addresses: list[int] = []  # of torch's tensors that have the hooks
        self._next_id = -1  # the next hook's id anywhere, at the time these hooks were last
        weakref.finalize(self, _remove, self._handles).atexit = False

    def put(
        self, parameters: Sequence[torch.nn.Parameter], hooks: Sequence[Callable[..., None]]
    ) -> None:
        """Replace all hooks."""
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
        """Move these hooks behind hooks that were added later, which may change gradients."""
        if self._next_id == RemovableHandle.next_id:
            return  # no hook was added to any tensor
        self._next_id = RemovableHandle.next_id
        for parameter, handle in zip(self._parameters, self._handles, strict=False):
            hooks: Any = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # NOT move_to_end: C++ would not see it

    def note_own(self, n_hooks: int) -> None:
        """Record that the caller has added hooks elsewhere that change no gradients."""
        self._next_id += n_hooks

    def lost(self, indices: Iterable[int]) -> int | None:
        """Return the first of these parameters that has lost its hook, or None."""
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


def not_held(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it does not keep its object alive; a later call does nothing.

    Use it for callbacks held by objects that live longer, such as hooks on parameters, or by
    objects that the method's object holds. A dropped wrapper then frees its memory without Python's
    cycle collector, which cannot see through native objects.
    """
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return found(*args) if found is not None else None

    return call


class Registrations:
    """Finds the parameters of a model that require a gradient, but did not when it was wrapped.

    Compares the dicts of each module, at 50 ns an entry, because programs and torch's own
    conversions bypass the functions that register parameters.

    Args:
        ignored: the names of parameters that are not averaged.
    """

    def __init__(self, model: torch.nn.Module, ignored: Collection[str]) -> None:
        self._model = model
        self._ignored = ignored
        self._watch()

    def new(self, trained: Iterable[torch.nn.Parameter]) -> tuple[list[str], list[str]]:
        """Return the names of parameters not in `trained`: newly registered, and thawed."""
        registered: list[str] = []
        if self._has_changed():
            known = set(map(id, trained))
            registered = [
                name for name, one in self._named() if one.requires_grad and id(one) not in known
            ]
            if not registered:
                self._watch()
        return registered, [name for name, one in self._frozen.items() if one.requires_grad]

    def _watch(self) -> None:
        self._frozen = {name: one for name, one in self._named() if not one.requires_grad}
        self._known: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in self._model.modules():
            self._known += [(held, dict(held)) for held in (part._parameters, part._modules)]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((n, one) for n, one in self._model.named_parameters() if n not in self._ignored)

    def _has_changed(self) -> bool:
        return any(
            len(held) != len(known)
            or any(name not in held or held[name] is not one for name, one in known.items())
            for held, known in self._known
        )
