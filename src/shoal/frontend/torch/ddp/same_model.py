"""Checks that all ranks wrap the same model in the same way, before a byte of it moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.average.agreeing import difference_among, shared_by
from shoal.errors import UsageError
from shoal.frontend.torch.tensor_buffers import kind_of

if TYPE_CHECKING:
    from shoal.group.group import Group


def check_same_model(
    module: torch.nn.Module,
    options: Mapping[str, object],
    group: Group,
    *,
    ignored: Collection[str],
    has_buffers: bool,
) -> None:
    """Compare the options, parameters and buffers of all ranks, except names in `ignored`.

    Compares each tensor's name, shape and dtype, and a trained parameter's strides, which its
    gradient shares. Costs one exchange of 32 bytes if all are equal. If not, UsageError on every
    rank names the first option or tensor that differs, and the ranks.
    """
    named = {name: repr(value) for name, value in options.items()}
    for name, parameter in module.named_parameters():
        if name not in ignored:
            named[f"parameter {name}"] = _parameter_text(parameter)
    for name, buffer in module.named_buffers() if has_buffers else ():
        if name not in ignored:
            named[f"buffer {name}"] = kind_of(buffer)
    if found := difference_among(group, f"model {next(shared_by(group).names)}", named):
        raise UsageError(
            "DistributedDataParallel: a model or an option appears not to match: "
            f"{found}; build the same model on every rank, and wrap it with the same arguments"
        )


def values_of(
    module: torch.nn.Module,
    ignored: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[str, Any]]:
    """Yield the values that must be equal on all ranks during training, each with its name.

    Leaves out the running statistics of batch norms, which depend on each rank's own batches.
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
            owner = f"optimizer {number}, parameter group {at}"
            yield from _comparable(owner, group)
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), str(index))
                state = optimizer.state.get(parameter, {})
                yield from _comparable(f"{owner}, parameter {name!r}", state)


def _has_own(part: torch.nn.Module) -> bool:
    is_norm = isinstance(part, torch.nn.modules.batchnorm._NormBase)
    return is_norm and not isinstance(part, torch.nn.SyncBatchNorm)


def _comparable(owner: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers in an optimizer's state or parameter group."""
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{key!r} of {owner}", _on_host(value)
        elif isinstance(value, (bool, int, float, tuple)):
            yield f"{key!r} of {owner}", value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _parameter_text(parameter: torch.Tensor) -> str:
    text = kind_of(parameter)
    if not parameter.requires_grad:
        return f"{text}, not trained"
    return text if parameter.is_contiguous() else f"{text}, strides {parameter.stride()}"
