"""The sum of sparse tensors: all ranks' entries are gathered, and every rank adds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.errors import UsageError
from shoal.frontend.torch.gpu import device as devices
from shoal.frontend.torch.tensor_buffers import describe, unsupported

if TYPE_CHECKING:
    from shoal.frontend.torch.gpu.device import Device
    from shoal.frontend.torch.tensor_buffers import TensorBuffers
    from shoal.group.group import Group


def in_host_memory(
    tensor: torch.Tensor, buffers: TensorBuffers
) -> tuple[torch.Tensor, Callable[[], None] | None, Sequence[Device]]:
    """The tensor, or a copy of it in host memory; what copies that back; and where it was.

    The host waits for both copies: how many entries there are only the device knows.

    Raises:
        Unsupported: shoal serves no tensors there.
    """
    if tensor.is_cpu:
        return tensor, None, ()
    device = devices.device_at(tensor.device)
    if device is None:
        what = f"{describe(buffers.group, buffers.operation)}: a tensor on {tensor.device}"
        raise unsupported(what, "pass tensor.cpu()")
    host = tensor.detach().cpu()

    def copy_back() -> None:
        with torch.no_grad():
            tensor.copy_(host)

    return host, copy_back, (device,)


def all_reduce_sparse(
    group: Group, tensor: torch.Tensor, buffers: TensorBuffers, *, name: str, timeout_s: float
) -> None:
    """Sum a COO tensor over all ranks, in place, and leave it coalesced.

    Args:
        group: calls three collectives, under names that begin with `name`.
        tensor: on the CPU; any number of sparse and dense dimensions, of one shape on all ranks.

    Raises:
        UsageError: the shapes, or the numbers of sparse dimensions, differ. The group goes on.
        ShoalError: as of any call of a group. The tensor is as it was.

    Cost: one all-gather of the counts, one of the indices, one of the values: with n ranks each
        receives the entries of the n - 1 others, and no sum is made on the way.
    """
    entries = tensor.detach().coalesce()
    shape, n_sparse = tuple(entries.shape), entries.sparse_dim()
    indices, values = entries.indices(), entries.values()

    counts = torch.empty(group.size, len(_described(entries)), dtype=torch.int64)
    group.all_gather(
        buffers.written(counts),
        buffers.read(torch.tensor(_described(entries))),
        name=f"{name}/counts",
        timeout_s=timeout_s,
    )
    _check_shapes(group, counts)
    n_entries = counts[:, -1].tolist()

    all_indices = torch.empty(sum(n_entries), n_sparse, dtype=torch.int64)
    all_values = torch.empty(sum(n_entries), *values.shape[1:], dtype=values.dtype)
    for what, gathered, own in (
        ("indices", all_indices, indices.t()),  # so that one rank's entries are one piece
        ("values", all_values, values),
    ):
        group.all_gather(
            [buffers.written(part) for part in torch.split(gathered, n_entries)],
            buffers.read(own),
            name=f"{name}/{what}",
            timeout_s=timeout_s,
        )
    total = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False)
    with torch.no_grad():  # NOT detach(): of a sparse tensor that is a copy
        tensor.copy_(total.coalesce())


# Enough for any tensor that torch can print; the same length on every rank.
_MOST_DIMENSIONS = 64


def _described(entries: torch.Tensor) -> list[int]:
    """What all ranks must have alike, and last the number of entries."""
    shape = list(entries.shape)
    rest = [0] * (_MOST_DIMENSIONS - len(shape))
    return [len(shape), entries.sparse_dim(), *shape, *rest, int(entries.values().shape[0])]


def _check_shapes(group: Group, counts: torch.Tensor) -> None:
    for rank, row in enumerate(counts.tolist()):
        own = counts[group.rank].tolist()
        if row[:-1] != own[:-1]:
            mine, theirs = _shape_in(own), _shape_in(row)
            raise UsageError(
                f"all_reduce of sparse tensors in {group}: this rank's tensor has {mine}, "
                f"that of rank {rank} has {theirs}; give all ranks the same shape"
            )


def _shape_in(row: list[int]) -> str:
    n_dimensions, n_sparse = row[:2]
    return f"shape {tuple(row[2 : 2 + n_dimensions])} with {n_sparse} sparse dimensions"
