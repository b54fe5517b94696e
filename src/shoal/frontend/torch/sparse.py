"""Sums sparse tensors: every rank gathers the entries of all ranks, and adds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.frontend.torch.tensor_buffers import TensorBuffers
    from shoal.group.group import Group

# More than torch can print; the record of a tensor has the same length on every rank.
_MOST_DIMENSIONS = 64


def all_reduce_sparse(
    group: Group, tensor: torch.Tensor, buffers: TensorBuffers, *, name: str, timeout_s: float
) -> None:
    """Sum a COO tensor in CPU memory over all ranks, in place, and leave it coalesced.

    Gathers counts, indices and values in three calls of the group, under names that begin with
    `name`, so each of n ranks receives the entries of the n - 1 others. Raises UsageError on every
    rank if shapes or numbers of sparse dimensions differ; the group stays usable. After a
    ShoalError the tensor is unchanged.
    """
    entries = tensor.detach().coalesce()
    shape, n_sparse = tuple(entries.shape), entries.sparse_dim()
    indices, values = entries.indices(), entries.values()

    rest = [0] * (_MOST_DIMENSIONS - len(shape))
    own = torch.tensor([len(shape), n_sparse, *shape, *rest, int(values.shape[0])])
    records = torch.empty(group.size, len(own), dtype=torch.int64)
    group.all_gather(
        buffers.written(records), buffers.read(own), name=f"{name}/counts", timeout_s=timeout_s
    )
    for rank, record in enumerate(records):
        if not torch.equal(record[:-1], own[:-1]):
            raise UsageError(
                f"all_reduce of sparse tensors in {group}: this rank's tensor has "
                f"{_shape_in(own)}, rank {rank}'s has {_shape_in(record)}; pass the same shape on "
                "all ranks"
            )
    n_entries = records[:, -1].tolist()

    all_indices = torch.empty(sum(n_entries), n_sparse, dtype=torch.int64)
    all_values = torch.empty(sum(n_entries), *values.shape[1:], dtype=values.dtype)
    for what, gathered, mine in (
        ("indices", all_indices, indices.t()),  # transposed: one rank's entries are contiguous
        ("values", all_values, values),
    ):
        group.all_gather(
            [buffers.written(part) for part in torch.split(gathered, n_entries)],
            buffers.read(mine),
            name=f"{name}/{what}",
            timeout_s=timeout_s,
        )
    try:
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=True)
    except RuntimeError as error:  # bad indices would write outside of the sum's memory
        raise UsageError(
            f"all_reduce of sparse tensors in {group}: a rank sent damaged indices ({error}); "
            "install the same shoal on all hosts"
        ) from error
    copy_sparse(tensor, total.coalesce())


def copy_sparse(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a sparse tensor, also one of inference mode, which belongs to a thread."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):  # NOT detach(): it copies
        tensor.copy_(source)


def _shape_in(record: torch.Tensor) -> str:
    n_dimensions, n_sparse, *rest = record.tolist()
    return f"shape {tuple(rest[:n_dimensions])} with {n_sparse} sparse dimensions"
