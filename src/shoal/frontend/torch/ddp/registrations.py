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
    """Whether parameters or modules were registered in any part of a model since `watch`.

    torch calls its hooks for every registration in the process, so a forward pass looks at one flag
    and not at all parameters.

    Attributes:
        changed: something was registered.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not _watched:
            _install()
        self.watch(model)

    def watch(self, model: torch.nn.Module) -> None:
        """From now on registrations in these parts count."""
        self.changed = False
        for part in model.modules():
            _watched.setdefault(part, weakref.WeakSet()).add(self)


_handles: Final[list[Any]] = []


def _install() -> None:
    if not _handles:
        hooks: Any = torch.nn.modules.module
        _handles.append(hooks.register_module_parameter_registration_hook(_note))
        _handles.append(hooks.register_module_module_registration_hook(_note))


def _note(part: torch.nn.Module, _name: str, _registered: object) -> None:
    for registrations in _watched.get(part, ()):
        registrations.changed = True


not_compiled_itself(_note)
