"""Do all ranks wrap the same model in the same way? Found out before a byte of it moves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UsageError


def check_same_model(
    module: torch.nn.Module,
    options: Mapping[str, object],
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    ignored: Collection[str],
    has_buffers: bool,
) -> None:
    """Compare options, what is broadcast of the model, and what of it is trained, on all ranks.

    Of each tensor name, shape and dtype; of trained parameters the strides too, which their
    gradients have. One exchange of 16 bytes where they are the same.

    Args:
        options: by name; of the wrapper, the same on all ranks.
        device: of what ranks exchange.
        ignored: names of parameters and buffers that are each rank's own.
        has_buffers: buffers are broadcast.

    Raises (on every rank):
        UsageError: they are not; names the first option or tensor that differs, and the ranks.
    """
    told = [f"{name}={value!r}" for name, value in options.items()]
    told += _parameters(module, ignored)
    if has_buffers:
        told += _buffers(module, ignored)
    digest = hashlib.blake2b("\n".join(told).encode(), digest_size=16).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    if all(torch.equal(other, own) for other in every):
        return
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, told, group=group)
    raise UsageError(_difference(lists))


def values_of(
    module: torch.nn.Module,
    ignored: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[str, Any]]:
    """What all ranks should hold alike while they train, each with its name.

    The running statistics of batch norms are of each rank's own batches, and left out.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        if name not in ignored:
            yield f"parameter {name!r}", _on_host(parameter)
    own = {id(buffer) for part in module.modules() if _has_own(part) for buffer in part.buffers()}
    for name, buffer in module.named_buffers():
        if name not in ignored and id(buffer) not in own:
            yield f"buffer {name!r}", _on_host(buffer)
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            whose = f"optimizer {number}, parameter group {at}"
            yield from _comparable(whose, group)
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), str(index))
                state = optimizer.state.get(parameter, {})
                yield from _comparable(f"{whose}, parameter {name!r}", state)


def _has_own(part: torch.nn.Module) -> bool:
    is_norm = isinstance(part, torch.nn.modules.batchnorm._NormBase)
    return is_norm and not isinstance(part, torch.nn.SyncBatchNorm)


def _comparable(whose: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers among what an optimizer keeps."""
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{key!r} of {whose}", _on_host(value)
        elif isinstance(value, (bool, int, float, tuple)):
            yield f"{key!r} of {whose}", value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _parameters(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if not parameter.requires_grad:
            yield f"parameter {_told(name, parameter)}, not trained"
        elif parameter.is_contiguous():
            yield f"parameter {_told(name, parameter)}"
        else:
            yield f"parameter {_told(name, parameter)}, strides {parameter.stride()}"


def _buffers(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[str]:
    for name, buffer in module.named_buffers():
        if name not in ignored:
            yield f"buffer {_told(name, buffer)}"


def _told(name: str, tensor: torch.Tensor) -> str:
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _difference(lists: Sequence[Sequence[str]]) -> str:
    """The first of what ranks told in which they differ, in words."""
    at = next(
        index
        for index in range(max(map(len, lists)))
        if len({tuple(told[index : index + 1]) for told in lists}) > 1
    )
    ranks: dict[str, list[int]] = {}
    for rank, told in enumerate(lists):
        what = told[at] if at < len(told) else "no such parameter or buffer"
        ranks.setdefault(what, []).append(rank)
    sides = "; ".join(f"{_of(some)}: {what}" for what, some in ranks.items())
    return (
        "DistributedDataParallel: what the ranks wrap, or how, appears not to match "
        f"({sides}); build the same model on every rank, and wrap it with the same arguments"
    )


def _of(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"ranks {shown}"
