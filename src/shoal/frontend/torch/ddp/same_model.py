"""Do all ranks wrap the same model? Found out before a byte of it moves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UsageError


def check_same_model(
    names: Sequence[str], parameters: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Compare names, shapes, dtypes and strides of the parameters on all ranks.

    One exchange of 16 bytes where they are the same.

    Raises (on every rank):
        UsageError: they are not; names the first parameter that differs, and the ranks.
    """
    told = [_told(name, parameter) for name, parameter in zip(names, parameters, strict=True)]
    digest = hashlib.blake2b("\n".join(told).encode(), digest_size=16).digest()
    device = parameters[0].device
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    if all(torch.equal(other, own) for other in every):
        return
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, told, group=group)
    raise UsageError(_difference(lists))


def _told(name: str, parameter: torch.Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    strides = "" if parameter.is_contiguous() else f", strides {parameter.stride()}"
    return f"{name}: {dtype}{list(parameter.shape)}{strides}"


def _difference(lists: Sequence[Sequence[str]]) -> str:
    """The first parameter in which the ranks differ, in words."""
    at = next(
        index
        for index in range(max(map(len, lists)))
        if len({tuple(told[index : index + 1]) for told in lists}) > 1
    )
    ranks: dict[str, list[int]] = {}
    for rank, told in enumerate(lists):
        ranks.setdefault(told[at] if at < len(told) else "no such parameter", []).append(rank)
    sides = "; ".join(f"{_of(some)}: {what}" for what, some in ranks.items())
    return (
        f"DistributedDataParallel: the ranks' models differ at trained parameter {at}, which "
        f"appears not to match ({sides}); build the same model on every rank"
    )


def _of(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"ranks {shown}"
