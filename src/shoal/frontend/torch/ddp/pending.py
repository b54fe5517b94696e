"""What a parameter has for a gradient while its average is on its way."""

from __future__ import annotations

from typing import Any, Final

import torch

from shoal.errors import UsageError
from shoal.frontend.torch.ddp.first_uses import tensors_in

_ADDS: Final = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))


class PendingGradient(torch.Tensor):
    """Has the shape of a gradient and no values: whatever asks for them is refused.

    Backward passes that are not averaged may add to it meanwhile; what they add is kept here. A
    program that drops it, as `zero_grad` does, has dropped the average too.

    Args:
        parameter: whose gradient it is.
        name: of the parameter.

    Attributes:
        of: the name of the parameter.
        local: what passes that are not averaged have added; None: nothing.
    """

    of: str
    local: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> PendingGradient:
        """One without memory."""
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.of, made.local = name, None
        return made

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        """Made by `__new__`, as tensors are."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.of!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of any operation on it."""
        if function in _ADDS and isinstance(args[0], PendingGradient) and not kwargs:
            return args[0]._add(args[1])
        found = (one for one in tensors_in((args, kwargs or {})) if isinstance(one, cls))
        raise UsageError(
            f"overlap_forward: the gradient of parameter {next(found).of} is no average yet: what "
            "needs gradients before the step, as clipping, a GradScaler or another optimizer does, "
            "calls model.synchronize() after backward and before that"
        )

    def _add(self, gradient: torch.Tensor) -> PendingGradient:
        if self.local is None:
            self.local = gradient.detach().clone()
        else:
            self.local += gradient.detach()
        return self
