"""Notice the parameters and modules that a program registers in a model after it was wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Registrations:
    """Compares the parameters and modules of all parts of a model with those at `watch`.

    Looks into the dicts of each module, 50 ns for an entry: programs, and torch's own conversions,
    write past the functions that register.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.watch(model)

    def watch(self, model: torch.nn.Module) -> None:
        """Compare with what is registered now."""
        self._known: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in model.modules():
            self._known += [(held, dict(held)) for held in (part._parameters, part._modules)]

    @property
    def changed(self) -> bool:
        """True if something was registered, replaced or removed."""
        return any(
            len(held) != len(known)
            or any(name not in held or held[name] is not one for name, one in known.items())
            for held, known in self._known
        )
