"""An optimizer's step that is taken later, some parameters at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import torch
from torch.optim import optimizer as torch_optimizer

from shoal.errors import Unsupported, UsageError

_NONE: Final = object()


class StepInParts:
    """A step with the hyperparameters of when it was put off.

    Attributes:
        whole: the ids of all parameters that it steps.

    Raises:
        UsageError: a GradScaler needs all gradients now.
        Unsupported: the optimizer has hooks, which are for a whole step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer, "found_inf"):
            raise UsageError(
                "overlap_forward: a GradScaler needs all gradients: call model.synchronize() after "
                "each backward"
            )
        if _hooks_of(optimizer):
            raise Unsupported(
                "overlap_forward: the optimizer has step hooks, and its steps are put off and "
                "taken in parts: call model.synchronize() before each step, or leave "
                "overlap_forward out"
            )
        self._optimizer = optimizer
        self._groups = [
            {name: _kept(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        self.whole = {id(p) for group in self._groups for p in group["params"]}

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step these alone.

        Raises:
            Unsupported: the optimizer keeps something in its groups that a step changes.
        """
        chosen = {id(parameter) for parameter in parameters}
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = parts = [
            {**group, "params": [p for p in group["params"] if id(p) in chosen]}
            for group in self._groups
        ]
        try:
            with _outside_forward():
                type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
        for group, part in zip(self._groups, parts, strict=True):
            self._check_same(group, part)

    def _check_same(self, group: dict[str, Any], part: dict[str, Any]) -> None:
        for name, value in part.items():
            if name != "params" and value is not group.get(name, _NONE):
                raise Unsupported(
                    f"overlap_forward: a step of {type(self._optimizer).__name__} changes {name!r} "
                    "of its parameter groups, and steps are taken in parts; parameters are half "
                    "stepped now. Begin anew with model.synchronize() before each step, or without "
                    "overlap_forward"
                )


def _kept(value: Any) -> Any:
    """What a hyperparameter is now; schedulers write into tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(map(_kept, value))
    return value


def _hooks_of(optimizer: torch.optim.Optimizer) -> bool:
    held: list[Collection[Any]] = [
        getattr(place, name, ())
        for place, names in (
            (optimizer, ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")),
            (torch_optimizer, ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
        )
        for name in names
    ]
    return any(map(len, held))


@contextlib.contextmanager
def _outside_forward() -> Iterator[None]:
    """What a forward pass is in changes neither how a step computes nor what it makes."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            modes.enter_context(torch.autocast("cpu", enabled=False))
        yield
