"""How a model and its optimizer call an `Overlap`, which they keep in mid-step only."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.frontend.torch.compiler import not_compiled

if TYPE_CHECKING:
    import torch

    from shoal.frontend.torch.ddp.overlap import Overlap


class KeptOverlap:
    """What hooks know of an overlap.

    NOT the overlap itself: a model may outlive its wrapper, and would keep its memory. While
    something is left to be done it is kept, for who uses the model next does that.
    """

    def __init__(self, overlap: Overlap) -> None:
        self._found: weakref.ref[Overlap] | None = weakref.ref(overlap)
        self._kept: Overlap | None = None

    def __call__(self) -> Overlap | None:
        """The overlap; None: nobody has it any more, or the model is wrapped anew."""
        return None if self._found is None else self._found()

    def keep(self, overlap: Overlap | None) -> None:
        """Keep it until this is called with None."""
        self._kept = overlap

    def end(self) -> None:
        """From now on there is none."""
        self._found = self._kept = None


@not_compiled
class HookedCall:
    """A hook of a module or an optimizer: calls a function with the overlap, if there is one.

    A copy of it, and what is unpickled, does nothing: a copied model has parameters of its own.
    """

    __slots__ = ("_call", "_held")

    def __init__(
        self, held: KeptOverlap | None = None, call: Callable[..., None] | None = None
    ) -> None:
        self._held, self._call = held, call

    def __call__(self, *args: Any) -> None:
        """As torch calls hooks; those of forward passes return nothing."""
        overlap = self._held() if self._held is not None else None
        if overlap is not None and self._call is not None:
            self._call(overlap, *args)

    def __reduce__(self) -> tuple[type[HookedCall], tuple[()]]:
        """The model is being copied or pickled.

        Raises:
            ShoalError: some of its parameters are not stepped.
        """
        overlap = self._held() if self._held is not None else None
        if overlap is not None:
            overlap.check_stepped()
        return HookedCall, ()


class StepInOverlap:
    """An optimizer's `step` that puts it off. Without an overlap it is what was there before."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: KeptOverlap) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before = before = vars(optimizer).get("step")

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            overlap = held()
            if overlap is not None:
                optimizer._opt_called = True
                return overlap.put_off(*args, **kwargs)
            if before is not None:
                return before(*args, **kwargs)
            return type(optimizer).step(optimizer, *args, **kwargs)

        # By this and `_opt_called` a scheduler that was made before knows steps when it sees them.
        vars(step).update(vars(optimizer.step))
        self._step = types.MethodType(step, optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Bring back what was there. What has been put around this since stays, and passes on."""
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("step") is not self._step:
            return
        if self._before is None:
            del optimizer.step
        else:
            optimizer.step = self._before  # type: ignore[method-assign]
