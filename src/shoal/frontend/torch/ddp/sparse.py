"""Averages sparse gradients, one by one, at the end of a backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shoal.frontend.torch.ddp.buckets import Bucket, call_hook, result_of


class SparseGradients:
    """The parameters of embeddings with `sparse=True`.

    Args:
        refuse: raises UsageError with this reason on this rank and the ranks that wait for it.

    Attributes:
        hook, state: a communication hook and its state; None: an all-reduce averages.
    """

    hook: Callable[[Any, Any], Any] | None = None
    state: object = None

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        refuse: Callable[[str], NoReturn],
    ) -> None:
        self.parameters = list(parameters)
        self.came = [False] * len(self.parameters)
        self._group = group
        self._refuse = refuse

    def hooks(self, on_full: Callable[[], None]) -> list[Callable[..., None]]:
        """Return a hook for each parameter; the last one called calls `on_full`."""

        def come(index: int, *_: object) -> None:
            self.came[index] = True
            if all(self.came):
                on_full()

        return [functools.partial(come, index) for index in range(len(self.parameters))]

    def begin(self) -> None:
        """Begin a step."""
        self.came = [False] * len(self.parameters)

    def end(self, factor: float, first: int) -> None:
        """Average all gradients, times `factor`; `first` numbers the first bucket of a hook."""
        for index, parameter in enumerate(self.parameters):
            given = parameter.grad
            gradient = _nothing(parameter) if given is None else given.detach()
            with torch.no_grad():
                if self.hook is None:
                    dist.all_reduce(gradient, group=self._group)
                    averaged = gradient.mul_(factor / dist.get_world_size(self._group))
                else:
                    is_last = index == len(self.parameters) - 1
                    bucket = Bucket(first + index, is_last, gradient, [gradient], [parameter])
                    averaged = result_of(call_hook(self.hook, self.state, bucket, self._refuse))
                    averaged = averaged.mul_(factor) if factor != 1.0 else averaged
            if given is not None or not averaged.is_sparse or averaged._nnz():
                parameter.grad = averaged

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Contribute nothing within the context, and do not change the program's gradients."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without elements."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape)
