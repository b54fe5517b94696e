"""Tensors as the contiguous memory that a group moves and folds.

A dense tensor is handed over as it is. Of one that is strided, or conjugated or negated lazily, a
contiguous copy is handed over, and results are copied back when the collective is done. Views of a
device's memory are for `staging.py` to exchange for the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError
from shoal.group.buffers import LOWEST_ADDRESS, BufferView, clash, lacks_memory

if TYPE_CHECKING:
    from shoal.frontend.torch.collectives import Factor
    from shoal.frontend.torch.gpu.device import Device
    from shoal.group.group import Group

DTYPES: Final[Mapping[torch.dtype, DType]] = {getattr(torch, str(each)): each for each in DType}

# On the way of every call: looked up once, and 0.18 us where BufferView(...) takes 0.30.
_STRIDED: Final = torch.strided
_new_view: Final = functools.partial(tuple.__new__, BufferView)


def describe(group: Group, operation: str) -> str:
    """The operation, in which group and by whom, as messages begin."""
    return f"{operation} in group {group.name!r} (rank {group.rank} of {group.size})"


def unsupported(what: str, instead: str) -> Unsupported:
    """The error that shoal cannot do something, with what to do instead."""
    return Unsupported(f"{what} is not supported; {instead}")


class TensorBuffers:
    """The tensors of one call, as views of the memory that the group gets.

    Args:
        operation: its name in messages.
        root: the rank that the call names; None if it names none.
        folds: values are computed, so the dtype must be one that shoal knows. What is only moved
            may be of any dtype: its bytes travel.
        factor: what is read is multiplied by it.

    Attributes:
        results: the tensors that the call writes.
        copies: those of them that are written by way of a copy, each with that.
        device: where a tensor is that is not in CPU memory; None if there is none such.
    """

    __slots__ = ("_factor", "_folds", "copies", "device", "group", "operation", "results", "root")

    def __init__(
        self,
        group: Group,
        operation: str,
        root: int | None = None,
        folds: bool = False,
        factor: Factor = None,
    ) -> None:
        self.group = group
        self.operation = operation
        self.root = root
        self._folds = folds
        self._factor = factor
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.device: Device | None = None
        self.results: list[torch.Tensor] = []

    def error(self, why: str) -> UsageError:
        """The error that a call is wrong: this operation of this rank `why`."""
        return UsageError(f"{describe(self.group, self.operation)} {why}")

    def copying_back(self) -> Callable[[], None] | None:
        """`copy_back`, or None if it has nothing to do."""
        return self.copy_back if self.copies else None

    def copy_back(self) -> None:
        """Bring the results from the contiguous copies to where the caller wants them."""
        for tensor, copy in self.copies:
            tensor.detach().copy_(copy)  # detach: a leaf that requires grad is written too

    def moved(self, view: BufferView, device: Device) -> BufferView:
        """A copy of a whole tensor on another device, to be copied back behind the call."""
        tensor: torch.Tensor = view.owner  # type: ignore[assignment]  # all are tensors here
        copy = device.copy_here(tensor.detach())
        # First: the tensor itself may be a copy, which is copied back to where it came from.
        self.copies.insert(0, (tensor, copy))
        return self._view(copy)

    # ---- views ----

    def updated(self, tensor: torch.Tensor) -> BufferView:
        """Memory that the collective reads and writes."""
        self.results.append(tensor)
        view = self._own_memory(tensor)
        if view is not None and self._factor is None:
            return view
        return self._copied_back(tensor, self._copy(tensor))

    def updated_apart(self, tensors: Sequence[torch.Tensor]) -> list[BufferView]:
        """Like `updated`, for several tensors that may share memory: then all are copied."""
        views = [self.updated(tensor) for tensor in tensors]
        if clash([view.extent for view in views], []) is None:
            return views
        self.copies.clear()
        return [self._copied_back(tensor, self._fresh_copy(tensor)) for tensor in tensors]

    def written(self, tensor: torch.Tensor) -> BufferView:
        """Memory that the collective only writes."""
        self.results.append(tensor)
        view = self._own_memory(tensor)
        return self._written_copy(tensor) if view is None else view

    def written_beside(
        self, tensor: torch.Tensor, inputs: Sequence[BufferView], own: int
    ) -> BufferView:
        """Like `written`, for a tensor that may share memory with the inputs.

        Args:
            own: the address of this rank's block of the inputs: it may lie just there.
        """
        view = self.written(tensor)
        return self._written_copy(tensor) if _overlap(view, inputs, own) else view

    def read(self, tensor: torch.Tensor) -> BufferView:
        """Memory that the collective only reads."""
        view = self._own_memory(tensor)
        if view is not None and self._factor is None:
            return view
        return self._view(self._copy(tensor))

    def read_beside(
        self, tensor: torch.Tensor, outputs: Sequence[BufferView], own: int
    ) -> BufferView:
        """Like `read`, for a tensor that may share memory with the outputs.

        Args:
            own: the address of this rank's block of the outputs: it may lie just there.
        """
        view = self.read(tensor)
        return self._view(self._fresh_copy(tensor)) if _overlap(view, outputs, own) else view

    def read_all_beside(
        self, tensors: Sequence[torch.Tensor], outputs: Sequence[BufferView]
    ) -> list[BufferView]:
        """Like `read_beside`, for a tensor and an output for each rank."""
        views = [self.read(tensor) for tensor in tensors]
        extents = [view.extent for view in views]
        own, rank = outputs[self.group.rank].address, self.group.rank
        if views[rank].address == own:
            extents[rank] = (own, own)
        if clash([output.extent for output in outputs], extents) is None:
            return views
        return [self._view(self._fresh_copy(tensor)) for tensor in tensors]

    # ---- the tensors themselves, or copies ----

    def _own_memory(self, tensor: torch.Tensor) -> BufferView | None:
        """The tensor itself, or None where the group needs a copy."""
        if not tensor.is_cpu or tensor.layout is not _STRIDED:
            self._note_device(tensor)
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        return self._view(tensor)

    def _note_device(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not _STRIDED:
            raise self._unsupported(tensor.layout, "pass tensor.to_dense()")
        from shoal.frontend.torch.gpu import device as devices  # few programs have any

        self.device = devices.device_at(tensor.device)
        if self.device is None:
            instead = "pass tensor.cpu(), or make a group of another backend for this device"
            raise self._unsupported(f"a tensor on {tensor.device}", instead)

    def _view(self, tensor: torch.Tensor) -> BufferView:
        dtype, address, n_elems = DTYPES.get(tensor.dtype), tensor.data_ptr(), tensor.numel()
        if address < LOWEST_ADDRESS and n_elems and lacks_memory(tensor, address):
            raise self.error(
                f"got a {type(tensor).__name__} of shape {tuple(tensor.shape)} that has no memory "
                "of its own; pass the tensor that holds its values"
            )
        if dtype is not None:
            return _new_view((address, n_elems, dtype, tensor))
        if self._folds:
            raise self._unsupported(tensor.dtype, "convert the tensor to one that shoal folds")
        return BufferView(address, tensor.nbytes, DType.UINT8, tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor, factor = tensor.detach(), self._factor
        if factor is not None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                what = f"PREMUL_SUM of {tensor.dtype}"
                raise self._unsupported(what, "multiply, then take SUM")
            if isinstance(factor, torch.Tensor):
                factor = factor.detach().reshape(())
            tensor = tensor.mul(factor)
        # NOT contiguous() alone: that keeps a lazy conjugation, whose memory says otherwise.
        return tensor.resolve_conj().resolve_neg().contiguous()

    def _fresh_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copy(tensor)
        return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy

    def _written_copy(self, tensor: torch.Tensor) -> BufferView:
        copy = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
        return self._copied_back(tensor, copy)

    def _copied_back(self, tensor: torch.Tensor, copy: torch.Tensor) -> BufferView:
        # torch would refuse to copy back, after everything has moved.
        if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise self.error(
                "got an expanded tensor: several elements of its "
                f"shape {tuple(tensor.shape)} share memory, so the result has no place; pass "
                "tensor.contiguous()"
            )
        self.copies.append((tensor, copy))
        return self._view(copy)

    def _unsupported(self, what: object, instead: str) -> Exception:
        return unsupported(f"{describe(self.group, self.operation)}: {what}", instead)


def _overlap(view: BufferView, others: Sequence[BufferView], own: int) -> bool:
    """Whether a view shares memory with any of the others, unless it begins at `own`."""
    begin, end = view.extent
    return begin != own and any(
        begin < other.address + other.n_bytes and other.address < end for other in others
    )
