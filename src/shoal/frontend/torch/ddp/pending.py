"""What a parameter has for a gradient while its average is on its way."""

from __future__ import annotations

from typing import Any, Final

import torch

from shoal.errors import UsageError
from shoal.frontend.torch.ddp.first_uses import asks_for_values, tensors_in

# How autograd adds a gradient to one that is there: not in place where it keeps the graph.
_ADD: Final[Any] = torch.ops.aten.add.Tensor
_ADD_IN_PLACE: Final[Any] = torch.ops.aten.add_.Tensor

_BY_PROGRAMS: Final = frozenset((torch.Tensor.add_, torch.Tensor.__iadd__))


class PendingGradient(torch.Tensor):
    """Has the shape of a gradient and no values: whatever asks for them is refused.

    Backward passes that are not averaged may add to it meanwhile, and so may a program, in place;
    what they add is kept here. A program that drops it, as `zero_grad` does, has dropped the
    average too.

    Args:
        parameter: whose gradient it is.
        name: of the parameter.

    Attributes:
        of: the name of the parameter.
        local: what has been added; None: nothing.
    """

    of: str
    local: torch.Tensor | None

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

    __format__ = object.__format__

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of any function of torch that a program calls with it.

        Also where torch would call no operation, as where it hands out an address or new memory.
        """
        if asks_for_values(function) and function not in _BY_PROGRAMS:
            raise _refusal(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of any operation on it, also of autograd's own."""
        if function in (_ADD, _ADD_IN_PLACE) and not kwargs and _fits(*args):
            return args[0]._add(args[1], in_place=function is _ADD_IN_PLACE)
        raise _refusal(args, kwargs)

    def _add(self, gradient: torch.Tensor, in_place: bool) -> PendingGradient:
        to = self if in_place else PendingGradient(self, self.of)
        if self.local is None:
            to.local = gradient.detach().clone()
        elif in_place:
            self.local += gradient.detach()
        else:
            to.local = self.local + gradient.detach()
        return to


def _fits(held: Any, added: Any) -> bool:
    """Whether this may be added: only what can is kept until there is an average to add it to."""
    return (
        isinstance(held, PendingGradient)
        and isinstance(added, torch.Tensor)
        and not isinstance(added, PendingGradient)
        and (added.shape, added.dtype) == (held.shape, held.dtype)
    )


def _refusal(args: Any, kwargs: Any) -> UsageError:
    """The error that a gradient among these arguments has no values."""
    given = tensors_in((args, kwargs or {}))
    name = next((one.of for one in given if isinstance(one, PendingGradient)), "?")
    return UsageError(
        f"overlap_forward: the gradient of parameter {name} is no average yet: what needs "
        "gradients before the step, as clipping, a GradScaler or another optimizer does, calls "
        "model.synchronize() after backward and before that"
    )
