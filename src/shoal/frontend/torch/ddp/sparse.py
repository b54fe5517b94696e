"""Gradients that are sparse: summed one by one at the end of a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.frontend.torch.ddp.bucket import Bucket


class SparseGradients:
    """The parameters of embeddings with `sparse=True`.

    Args:
        first: the number that the first one's bucket has for a communication hook.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup, first: int
    ) -> None:
        self.parameters = list(parameters)
        self.came = [False] * len(self.parameters)
        self._group = group
        self._first = first

    def hooks(self, on_full: Callable[[], None]) -> list[Callable[..., None]]:
        """What each parameter calls when its gradient is there.

        Args:
            on_full: called when those of all are.
        """

        def coming(index: int) -> Callable[..., None]:
            def come(*_: object) -> None:
                self.came[index] = True
                if all(self.came):
                    on_full()

            return come

        return [coming(index) for index in range(len(self.parameters))]

    def begin(self) -> None:
        """Nothing has come yet."""
        self.came = [False] * len(self.parameters)

    def end(self, factor: float, hook: Callable[[Any, Any], Any] | None, state: object) -> None:
        """Average all of them.

        Args:
            factor: by which the averages are multiplied.
            hook: the communication hook that does it; None: none.
        """
        for index, parameter in enumerate(self.parameters):
            given = parameter.grad
            gradient = _nothing(parameter) if given is None else given.detach()
            with torch.no_grad():
                averaged = self._averaged(index, gradient, hook, state, factor)
            if given is not None or not averaged.is_sparse or averaged._nnz():
                parameter.grad = averaged

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Contribute nothing meanwhile, and leave the program's gradients as they are."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient

    def _averaged(
        self, index: int, gradient: torch.Tensor, hook: Any, state: object, factor: float
    ) -> torch.Tensor:
        if hook is None:
            dist.all_reduce(gradient, group=self._group)
            return gradient.mul_(factor / dist.get_world_size(self._group))
        is_last = index == len(self.parameters) - 1
        number = self._first + index
        bucket = Bucket(number, is_last, gradient, [gradient], [self.parameters[index]])
        result = hook(state, bucket).wait()
        found: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return found.mul_(factor) if factor != 1.0 else found


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without any element."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape)
