"""Tensors as the contiguous memory that a group moves and folds.

A dense tensor is used as it is. A tensor that is strided, or lazily conjugated or negated, is
replaced by a contiguous copy, and results are copied back after the collective. `gpu/pieces.py`
replaces views of device memory by views of host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError
from shoal.group.buffers import LOWEST_ADDRESS, BufferView, lacks_memory

if TYPE_CHECKING:
    from shoal.frontend.torch.collectives import Factor
    from shoal.frontend.torch.gpu.device import Device
    from shoal.group.group import Group

DTYPES: Final[Mapping[torch.dtype, DType]] = {getattr(torch, str(each)): each for each in DType}
HALVES: Final = (torch.bfloat16, torch.float16)

# Every call uses these; 0.18 us where BufferView(...) takes 0.30.
_STRIDED: Final = torch.strided
_new_view: Final = functools.partial(tuple.__new__, BufferView)


def describe(group: Group, operation: str) -> str:
    """Return the prefix of messages: the operation, its group and the rank."""
    return f"{operation} in group {group.name!r} (rank {group.rank} of {group.size})"


def kind_of(tensor: torch.Tensor) -> str:
    """Describe a tensor's dtype and shape: "float32[2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def unsupported(what: str, instead: str) -> Unsupported:
    """Return the error that shoal does not support `what`; `instead` is the remedy."""
    return Unsupported(f"{what} is not supported; {instead}")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory, as after `expand`."""
    return any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


class TensorBuffers:
    """The tensors of one call, as views of the memory that the group gets.

    Args:
        operation: its name in messages.
        folds: True if values are computed, so shoal must know the dtype; else it sends bytes.

    Attributes:
        root: the root rank of the call, or None.
        factor: multiplies the tensors that are read; None: they are read as they are.
        widens: True: bfloat16 and float16 are sent as float32, which codecs require.
        results: the tensors that the call writes.
        copies: pairs of a result and the contiguous copy that the call writes in its place.
        device: the device of a tensor outside CPU memory, or None.
    """

    __slots__ = (
        *("_folds", "copies", "device", "factor", "group", "operation", "results", "root"),
        "widens",
    )

    def __init__(self, group: Group, operation: str, folds: bool = False) -> None:
        self.group = group
        self.operation = operation
        self._folds = folds
        self.root: int | None = None
        self.factor: Factor = None
        self.widens = False
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.device: Device | None = None
        self.results: list[torch.Tensor] = []

    def error(self, why: str) -> UsageError:
        """Return the error of a wrong call: "all_reduce in group 'world' (rank 1 of 2) {why}"."""
        return UsageError(f"{describe(self.group, self.operation)} {why}")

    def copy_back(self) -> None:
        """Copy the results from the contiguous copies into the caller's tensors."""
        for tensor, copy in self.copies:
            tensor.detach().copy_(copy)  # detach: a leaf that requires grad is written too

    # ---- views ----

    def updated(self, tensor: torch.Tensor) -> BufferView:
        """Return memory that the collective reads and writes."""
        self.results.append(tensor)
        view = self._own_memory(tensor)
        if view is not None and self.factor is None:
            return view
        return self._copied_back(tensor, self._copy(tensor))

    def written(self, tensor: torch.Tensor) -> BufferView:
        """Return memory that the collective only writes."""
        self.results.append(tensor)
        view = self._own_memory(tensor)
        if view is not None:
            return view
        copy = torch.empty_like(
            tensor.detach(), dtype=self._dtype_of(tensor), memory_format=torch.contiguous_format
        )
        return self._copied_back(tensor, copy)

    def read(self, tensor: torch.Tensor) -> BufferView:
        """Return memory that the collective only reads."""
        view = self._own_memory(tensor)
        if view is not None and self.factor is None:
            return view
        return self._view(self._copy(tensor))

    def note_device(self, tensor: torch.Tensor) -> None:
        """Set `device` to a tensor's device; raise Unsupported if shoal does not serve it."""
        from shoal.frontend.torch.gpu import device as devices  # few programs use one

        self.device = devices.device_at(tensor.device)
        if self.device is None:
            instead = "pass tensor.cpu(), or use a group of another backend for this device"
            raise self._unsupported(f"a tensor on {tensor.device}", instead)

    # ---- the tensors themselves, or copies ----

    def _own_memory(self, tensor: torch.Tensor) -> BufferView | None:
        """Return the tensor's own memory; None if the group needs a copy."""
        if tensor.layout is not _STRIDED:
            raise self._unsupported(tensor.layout, "pass tensor.to_dense()")
        if not tensor.is_cpu:
            self.note_device(tensor)
        is_narrower = self.widens and tensor.dtype in HALVES
        is_dense = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        return self._view(tensor) if is_dense and not is_narrower else None

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is sent."""
        return torch.float32 if self.widens and tensor.dtype in HALVES else tensor.dtype

    def _view(self, tensor: torch.Tensor) -> BufferView:
        dtype, address, n_elems = DTYPES.get(tensor.dtype), tensor.data_ptr(), tensor.numel()
        if address < LOWEST_ADDRESS and n_elems and lacks_memory(tensor, address):
            if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor
                return self._view(tensor.trigger_wait())
            raise self.error(
                f"got a {type(tensor).__name__} of shape {tuple(tensor.shape)} without its own "
                "memory; pass the tensor that holds its values"
            )
        if dtype is not None:
            return _new_view((address, n_elems, dtype, tensor))
        if self._folds:
            raise self._unsupported(tensor.dtype, "convert the tensor to a dtype that shoal folds")
        if tensor.is_quantized:  # without its scale its integers mean nothing
            raise self._unsupported(tensor.dtype, "send tensor.dequantize()")
        return BufferView(address, tensor.nbytes, DType.UINT8, tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor, factor = tensor.detach().to(self._dtype_of(tensor)), self.factor
        if factor is not None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                what = f"PREMUL_SUM of {tensor.dtype}"
                raise self._unsupported(what, "multiply, then take SUM")
            if isinstance(factor, torch.Tensor):
                factor = factor.detach().reshape(())
            tensor = tensor.mul(factor)
        # NOT only contiguous(): it keeps a lazy conjugation, which is not in the memory.
        return tensor.resolve_conj().resolve_neg().contiguous()

    def _copied_back(self, tensor: torch.Tensor, copy: torch.Tensor) -> BufferView:
        # Otherwise torch would refuse to copy back, after all data has moved.
        if is_expanded(tensor):
            raise self.error(
                f"got an expanded tensor: elements of its shape {tuple(tensor.shape)} share "
                "memory, which cannot hold the result; pass tensor.contiguous()"
            )
        self.copies.append((tensor, copy))
        return self._view(copy)

    def _unsupported(self, what: object, instead: str) -> Exception:
        return unsupported(f"{describe(self.group, self.operation)}: {what}", instead)
