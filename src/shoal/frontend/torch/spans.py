"""Tensors as the contiguous memory that a group moves and folds, and stand-ins where they are not.

A dense CPU tensor is handed over as it is. One that is strided, conjugated or negated lazily is
copied first, and copied back when the collective is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError
from shoal.group.buffers import Span, clash

if TYPE_CHECKING:
    from shoal.frontend.torch.reduce_ops import Factor

DTYPES: Final[Mapping[torch.dtype, DType]] = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
    torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX128,
    torch.uint16: DType.UINT16,
    torch.uint32: DType.UINT32,
    torch.uint64: DType.UINT64,
}

_STRIDED: Final = torch.strided  # looked up once: this is on the way of every call


class Spans:
    """The memory of one collective's tensors.

    Args:
        describe: gives the call's name in messages, out of the operation's.
        folds: values are computed, so the dtype must be one that shoal knows. What is only moved
            may be of any dtype: its bytes travel.
    """

    __slots__ = ("_describe", "_folds", "_operation", "_stand_ins")

    def __init__(self, describe: Callable[[str], str], operation: str, folds: bool) -> None:
        self._describe = describe
        self._operation = operation
        self._folds = folds
        self._stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_stand_ins(self) -> bool:
        """Whether `copy_back` has something to do."""
        return bool(self._stand_ins)

    def copy_back(self) -> None:
        """Bring the results from the stand-ins to where the caller wants them."""
        for tensor, stand_in in self._stand_ins:
            tensor.detach().copy_(stand_in)  # detach: a leaf that requires grad is written too

    def updated(self, tensor: torch.Tensor, factor: Factor = None) -> Span:
        """Memory that the collective reads and writes; what it reads is multiplied by `factor`."""
        span = self._own_memory(tensor)
        if span is not None and factor is None:
            return span
        return self._stand_in(tensor, self._copy(tensor, factor))

    def updated_apart(self, tensors: Sequence[torch.Tensor], factor: Factor) -> list[Span]:
        """Like `updated`, for several tensors that may share memory: then all are stand-ins."""
        found = [self.updated(tensor, factor) for tensor in tensors]
        if clash([span.extent for span in found], []) is None:
            return found
        self._stand_ins.clear()
        return [self._stand_in(tensor, self._fresh_copy(tensor, factor)) for tensor in tensors]

    def written(self, tensor: torch.Tensor) -> Span:
        """Memory that the collective only writes."""
        span = self._own_memory(tensor)
        if span is not None:
            return span
        return self._stand_in(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))

    def read(self, tensor: torch.Tensor, factor: Factor = None) -> Span:
        """Memory that the collective only reads; what it reads is multiplied by `factor`."""
        span = self._own_memory(tensor)
        if span is not None and factor is None:
            return span
        return self._span(self._copy(tensor, factor))

    def read_beside(self, tensor: torch.Tensor, outputs: Sequence[Span], own: int) -> Span:
        """Like `read`, for a tensor that may share memory with the outputs.

        Args:
            own: the address of this rank's block of the outputs: it may lie just there.
        """
        span = self.read(tensor)
        if span.address != own and any(_overlap(span, output) for output in outputs):
            return self._span(self._fresh_copy(tensor, None))
        return span

    def read_all_beside(
        self, tensors: Sequence[torch.Tensor], outputs: Sequence[Span], rank: int
    ) -> list[Span]:
        """Like `read_beside`, for a tensor per rank."""
        found = [self.read(tensor) for tensor in tensors]
        own = outputs[rank].address
        extents = [span.extent for span in found]
        if found[rank].address == own:
            extents[rank] = (own, own)
        if clash([span.extent for span in outputs], extents) is None:
            return found
        return [
            self.read_beside(tensor, outputs, own if to == rank else -1)
            for to, tensor in enumerate(tensors)
        ]

    def written_beside(self, tensor: torch.Tensor, inputs: Sequence[Span], own: int) -> Span:
        """Like `written`, for a tensor that may share memory with the inputs.

        Args:
            own: the address of this rank's block of the inputs: it may lie just there.
        """
        span = self.written(tensor)
        if span.address != own and any(_overlap(span, one) for one in inputs):
            return self._stand_in(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        return span

    def _own_memory(self, tensor: torch.Tensor) -> Span | None:
        """The tensor itself, or None where the group needs a stand-in."""
        if not tensor.is_cpu or tensor.layout is not _STRIDED:
            raise self._unsupported_place(tensor)
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        return self._span(tensor)

    def _span(self, tensor: torch.Tensor) -> Span:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None:
            return Span(tensor.data_ptr(), tensor.numel(), dtype, tensor)
        if self._folds:
            raise self._unsupported(tensor.dtype, "convert the tensor to one that shoal folds")
        return Span(tensor.data_ptr(), tensor.nbytes, DType.UINT8, tensor)

    def _copy(self, tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
        tensor = tensor.detach()
        if factor is None:
            # NOT contiguous() alone: that keeps a lazy conjugation, whose memory says otherwise.
            return tensor.resolve_conj().resolve_neg().contiguous()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise self._unsupported(f"PREMUL_SUM of {tensor.dtype}", "multiply, then take SUM")
        if isinstance(factor, torch.Tensor):
            factor = factor.detach().reshape(())
        return tensor.mul(factor).resolve_conj().resolve_neg().contiguous()

    def _fresh_copy(self, tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
        copy = self._copy(tensor, factor)
        return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy

    def _stand_in(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> Span:
        # torch would refuse to copy back, after everything has moved.
        if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
            doing = self._describe(self._operation)
            raise UsageError(
                f"{doing} got an expanded tensor: several elements of its "
                f"shape {tuple(tensor.shape)} share memory, so the result has no place; pass "
                "tensor.contiguous()"
            )
        self._stand_ins.append((tensor, stand_in))
        return self._span(stand_in)

    def _unsupported_place(self, tensor: torch.Tensor) -> Unsupported:
        if tensor.layout is not torch.strided:
            return self._unsupported(tensor.layout, "pass tensor.to_dense()")
        meanwhile = "pass tensor.cpu(), or make a group of another backend for this device"
        return self._unsupported(f"a tensor on {tensor.device}", meanwhile)

    def _unsupported(self, what: object, meanwhile: str) -> Unsupported:
        doing = self._describe(self._operation)
        return Unsupported(f"{doing}: {what} is not there yet; {meanwhile}")


def _overlap(a: Span, b: Span) -> bool:
    return a.address < b.address + b.n_bytes and b.address < a.address + a.n_bytes
