"""A model that has changed since it was wrapped: gradients would come that nobody averages."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch


class ModelWatch:
    """A model's parameters as they were when it was wrapped.

    Args:
        averaged: those whose gradients are averaged.
        ignored: the names of those that are each rank's own.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        averaged: Sequence[torch.nn.Parameter],
        ignored: Collection[str],
    ) -> None:
        self._module = module
        self._averaged = {id(parameter) for parameter in averaged}
        self._ignored = frozenset(ignored)
        self._look()

    def _look(self) -> None:
        self._dicts: list[dict[str, torch.nn.Parameter | None]] = []
        self._keys: list[str] = []
        self._found: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        for prefix, part in self._module.named_modules():
            for name, parameter in part._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter is None or full in self._ignored:
                    continue
                self._dicts.append(part._parameters)
                self._keys.append(name)
                self._found.append(parameter)
                if id(parameter) not in self._averaged:
                    self._frozen.append(parameter)

    def change(self, rank: int) -> str:
        """What has changed for the worse; empty: nothing.

        Cost: 0.04 us a parameter.
        """
        thawed = any(parameter.requires_grad for parameter in self._frozen)
        held = map(dict.get, self._dicts, self._keys)
        if not thawed and all(map(operator.is_, held, self._found)):
            return ""
        self._look()  # what only has another name, as what is pruned, is no matter
        return self._told(thawed, rank) if any(p.requires_grad for p in self._frozen) else ""

    def _told(self, thawed: bool, rank: int) -> str:
        strangers = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        named = self._module.named_parameters()
        names = ", ".join(name for name, parameter in named if id(parameter) in strangers)
        if thawed:
            return (
                f"parameter {names} requires a gradient now on rank {rank}, and did not when the "
                "model was wrapped"
            )
        return (
            f"parameter {names} is another object on rank {rank} than when the model was wrapped, "
            "as after load_state_dict(assign=True)"
        )
