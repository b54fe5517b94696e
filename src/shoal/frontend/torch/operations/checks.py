"""What this rank alone can see to be wrong: said before any byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.operations.calls import Calls, Tensors
from shoal.group.buffers import Range, Span, clash


class Checks(Calls):
    """The checks that several operations share; all of them raise `UsageError`."""

    def _check_some(self, tensors: Tensors, operation: str) -> None:
        """There is a tensor; if not, it is the error that torch's dispatcher raises over Gloo."""
        if not tensors:
            doing = self.describe(operation)
            raise Unsupported(f"{doing} takes one tensor at least, and the list is empty")

    def _only(self, tensors: Tensors, operation: str) -> torch.Tensor:
        self._check_some(tensors, operation)
        if len(tensors) != 1:
            why = f"takes one tensor per process, not {len(tensors)}"
            raise self._usage_error(operation, why)
        return tensors[0]

    def _own_list(self, lists: list[Tensors] | Tensors, operation: str) -> Tensors:
        """The list for this process: torch wraps it in another, its overloads do not."""
        if not lists or isinstance(lists[0], torch.Tensor):
            return cast("Tensors", lists)
        if len(lists) != 1:
            why = f"takes one list of tensors per process, not {len(lists)}"
            raise self._usage_error(operation, why)
        return lists[0]

    def _roots_list(
        self, lists: list[Tensors] | Tensors, root: int, operation: str, side: str
    ) -> Tensors | None:
        """The list that the root alone gives; None on every other rank."""
        self._check_rank(root, operation, "root")
        blocks = self._own_list(lists, operation)
        if self._group.rank == root:
            return blocks
        if blocks:
            why = f"takes {side} on rank {root}, the root, and none here"
            raise self._usage_error(operation, why)
        return None

    def _pairs(
        self, operation: str, outputs: Tensors, inputs: Tensors
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        if len(outputs) != len(inputs):
            why = f"takes as many outputs as inputs, not {len(outputs)} and {len(inputs)}"
            raise self._usage_error(operation, why)
        self._check_some(outputs, operation)
        return list(zip(outputs, inputs, strict=True))

    def _check_rank(self, rank: int, operation: str, what: str) -> None:
        if not 0 <= rank < self._group.size:
            why = f"has {what} {rank}; ranks of this group are 0 to {self._group.size - 1}"
            raise self._usage_error(operation, why)

    def _check_count(self, operation: str, side: str, blocks: Sequence[object]) -> None:
        if len(blocks) != self._group.size:
            why = f"takes {self._group.size} {side}, one for each rank, not {len(blocks)}"
            raise self._usage_error(operation, why)

    def _check_blocks(self, operation: str, side: str, blocks: Tensors, like: torch.Tensor) -> None:
        """The list has a tensor for each rank, all like the one on the other side."""
        self._check_count(operation, side, blocks)
        for rank, block in enumerate(blocks):
            if block.dtype != like.dtype or block.numel() != like.numel():
                raise self._usage_error(
                    operation,
                    f"cannot run: {side}[{rank}] has {_extent(block)} but must have "
                    f"{_extent(like)}, as the other side has",
                )

    def _check_same_dtype(self, operation: str, tensors: Tensors) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise self._usage_error(operation, f"takes tensors of one dtype, not of {names}")

    def _check_contiguous(self, operation: str, **tensors: torch.Tensor) -> None:
        """As torch's own backends: rows of a strided tensor are not what lies in memory."""
        for side, tensor in tensors.items():
            if not tensor.is_contiguous():
                why = f"takes an {side} that is contiguous; pass {side}.contiguous()"
                raise self._usage_error(operation, why)

    def _check_whole(
        self, operation: str, side: str, whole: torch.Tensor, block: torch.Tensor
    ) -> None:
        """One tensor has the elements of all ranks, the other those of one."""
        size = self._group.size
        if whole.dtype != block.dtype or whole.numel() != block.numel() * size:
            raise self._usage_error(
                operation,
                f"cannot run: the {side} has {_extent(whole)} but must have {size} times "
                f"{_extent(block)}",
            )

    def _check_splits(
        self, operation: str, side: str, tensor: torch.Tensor, splits: Sequence[int]
    ) -> None:
        """The splits share out the tensor's first dimension; none at all share it out evenly."""
        size, n_rows = self._group.size, tensor.shape[0] if tensor.dim() else None
        if n_rows is None:
            why = f"cannot share out the {side}: it has no dimensions"
        elif not splits:
            why = f"cannot share out the {side}'s {n_rows} rows evenly among {size} ranks"
            if n_rows % size == 0:
                return
        else:
            self._check_count(operation, f"{side} splits", splits)
            why = f"cannot share out the {side}'s {n_rows} rows as {list(splits)}"
            if min(splits) >= 0 and sum(splits) == n_rows:
                return
            why += f", which are {sum(splits)}" if min(splits) >= 0 else ": a count is negative"
        raise self._usage_error(operation, why)

    def _check_apart(self, operation: str, side: str, spans: Sequence[Span]) -> None:
        """No two of what is written share memory."""
        found = clash([span.extent for span in spans], [])
        if found is not None:
            first, second = sorted(found[:2])
            why = f"would write {side}[{first}] and {side}[{second}] into the same memory"
            raise self._usage_error(operation, why)

    def _check_calls_apart(
        self, operation: str, calls: Sequence[tuple[Sequence[Span], Span]]
    ) -> None:
        """None of several calls writes where another one writes or reads.

        Args:
            calls: what each writes, and what it reads; these two have been checked against each
                other, and may share this rank's own block.
        """
        if len(calls) == 1:
            return
        n_outputs = len(calls[0][0])
        own = self._group.rank if n_outputs > 1 else 0
        written = [span.extent for outputs, _ in calls for span in outputs]
        read = [
            part
            for outputs, source in calls
            for part in _around(outputs[own].extent, source.extent)
        ]
        found = clash(written, read)
        if found is None:
            return
        one, other, both_written = found
        first, second = one // n_outputs, other // (n_outputs if both_written else 2)
        what = "also writes" if both_written else "reads"
        why = f"would write for tensor {first} where it {what} for tensor {second}"
        raise self._usage_error(operation, f"{why}; give them memory of their own")

    def _usage_error(self, operation: str, why: str) -> UsageError:
        return UsageError(f"{self.describe(operation)} {why}")


def _around(own: Range, whole: Range) -> tuple[Range, Range]:
    """What is left of `whole` before and after the `own` part."""
    return (whole[0], min(whole[1], own[0])), (max(whole[0], own[1]), whole[1])


def _extent(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
