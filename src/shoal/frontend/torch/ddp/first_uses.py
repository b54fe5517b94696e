"""Which parameters a forward pass uses before their module is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

# What tells nothing of values.
_ABOUT: Final = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "_version"),
        *("requires_grad", "grad", "grad_fn", "is_leaf", "is_sparse", "is_cuda", "is_cpu"),
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset"),
        *("is_contiguous", "is_floating_point", "is_complex", "__hash__", "__len__"),
        *("is_meta", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "get_device"),
    )
)


class FirstUses(TorchFunctionMode):
    """Sees every function of torch that is called while this is entered.

    Args:
        index: of each parameter, by its id.
        called: whose modules were called in the pass under way; grows meanwhile.

    Attributes:
        early: what was used before its module was called.
    """

    def __init__(self, index: Mapping[int, int], called: set[int]) -> None:
        super().__init__()
        self._index, self._called = index, called
        self.early: set[int] = set()

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of the function."""
        if asks_for_values(function):
            found = {self._index.get(id(one), -1) for one in tensors_in((args, kwargs or {}))}
            self.early |= found - self._called - {-1}
        return function(*args, **(kwargs or {}))


def asks_for_values(function: Any) -> bool:
    """Whether a function of torch does more than to tell what kind of tensor it is called with."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of a property, whose name it is that tells
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name not in _ABOUT


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a function, however deep in them."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from tensors_in(tuple(given.values()))
    elif isinstance(given, (tuple, list)):
        for one in given:
            yield from tensors_in(one)
