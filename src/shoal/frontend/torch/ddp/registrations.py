"""Notice what a program registers in a model after it was wrapped."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from shoal.frontend.torch.compiler import not_compiled_itself

_watched: Final[weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[Registrations]]] = (
    weakref.WeakKeyDictionary()
)


class Registrations:
    """Whether parameters or modules of any part of a model are others than at `watch`.

    torch calls its hooks for every registration in the process, which sets one flag. Some programs,
    and torch's own conversions, write past them into the dicts of a module: what was there before
    is looked up, 50 ns for each.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not _watched:
            _install()
        self.watch(model)

    def watch(self, model: torch.nn.Module) -> None:
        """From now on changes in these parts count."""
        self.is_noted = False
        self._known: list[tuple[dict[str, Any], str, object]] = []
        for part in model.modules():
            _watched.setdefault(part, weakref.WeakSet()).add(self)
            for held in (part._parameters, part._modules):
                self._known += [(held, name, one) for name, one in held.items()]

    @property
    def changed(self) -> bool:
        """Whether something was registered, replaced or removed."""
        return self.is_noted or any(held.get(name) is not one for held, name, one in self._known)


_handles: Final[list[Any]] = []


def _install() -> None:
    if not _handles:
        hooks: Any = torch.nn.modules.module
        _handles.append(hooks.register_module_parameter_registration_hook(_note))
        _handles.append(hooks.register_module_module_registration_hook(_note))


def _note(part: torch.nn.Module, _name: str, _registered: object) -> None:
    for registrations in _watched.get(part, ()):
        registrations.is_noted = True


not_compiled_itself(_note)
