"""`shoal.torch.fsdp.compress`: gradients and parameters of FSDP2 in a codec between hosts.

In each module of `fully_shard` torch lets programs replace the reduce-scatter and the all-gather.
The replacements here make the same calls of torch.distributed with a codec.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from shoal.codec import Codec, parse_wire
from shoal.errors import UsageError
from shoal.frontend.torch import default_group, group_in
from shoal.frontend.torch.tensor_buffers import HALVES
from shoal.frontend.torch.work import calls_with

if TYPE_CHECKING:
    import torch.distributed as dist

    from shoal.group.group import Group

_LOG: Final = logging.getLogger("shoal")


def compress(
    model: torch.nn.Module,
    gradients: str | Codec | None = None,
    weights: str | Codec | None = None,
) -> None:
    """Send the gradients and parameters of FSDP2 between hosts in a codec.

    ::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        shoal.torch.fsdp.compress(model, gradients="mxfp8", weights="mxint8")

    Call it on every rank after `fully_shard`, before the first step or between two steps. A rank's
    own part of the gathered parameters is rounded too, so all ranks compute with the same weights.
    The sharded parameters, used by the optimizer and checkpoints, keep their precision. Tensors of
    other dtypes than float32, bfloat16 and float16, and groups on one host, are sent unchanged.
    The reasons are in docs/decisions/0084.

    Args:
        model: contains all modules to which `fully_shard` was applied.
        gradients: the codec of reduce-scatters: "bf16", "fp16", "mxfp8", "mxint8" or "mxfp4";
            "identity": unchanged; None: as before this call.
        weights: the codec of all-gathers of parameters. "bf16" and "mxint8" round weights by less
            than 1 % of a block's largest weight, "mxfp8" by up to 12.5 %. None: as before.

    Raises:
        UsageError: an unknown codec, or a model whose collectives cannot use one, with the reason.
            Nothing has changed.
    """
    of_gradients, of_weights = _codec_of("gradients", gradients), _codec_of("weights", weights)
    sharded = [
        (f"module {name!r}" if name else "the model", module, parameters)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for parameters in _groups_of(name, module)
    ]
    if not sharded:
        raise UsageError("the model has no sharded parameters: apply fully_shard before compress")
    for where, _, parameters in sharded:
        _check_group(where, parameters)
        if of_gradients is not None:
            _check_usual(where, parameters._reduce_scatter_comm, DefaultReduceScatter)
        if of_weights is not None:
            _check_usual(where, parameters._all_gather_comm, DefaultAllGather)
            if of_weights.is_narrow:
                _check_replicas(where, parameters.mesh_info)
    for where, module, parameters in sharded:
        if of_gradients is not None:
            module.set_custom_reduce_scatter(
                _ReduceScatter(DefaultReduceScatter(), of_gradients, f"gradients of {where}")
            )
        if of_weights is not None:
            only = parameters.mesh_info.shard_process_group
            what = f"parameters of {where}"
            module.set_custom_all_gather(_AllGather(DefaultAllGather(), of_weights, what, only))


_NARROWED: Final = (torch.float32, *HALVES)


def _codec_of(argument: str, given: object) -> Codec | None:
    if given is None:
        return None
    codec = parse_wire(given) if isinstance(given, str | Codec) else None
    if codec is None or codec.keep:
        raise UsageError(f"{argument}={given}: FSDP keeps no residuals; give the name of a codec")
    return codec


def _groups_of(name: str, module: Any) -> list[Any]:
    """Return the parameters of a module as torch groups them: one group, or none."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # in this torch a module has at most one group
        found = [each for each in [state._fsdp_param_group] if each is not None]
    if len(found) > 1:
        raise UsageError(
            f"module {name!r} has parameters on {len(found)} meshes (shard_placement_fn), for "
            "which torch replaces no collective: apply fully_shard to each of its parts separately"
        )
    return list(found)


def _check_group(where: str, parameters: Any) -> None:
    """Raise UsageError unless the parameters are sharded over a shoal group."""
    mesh = parameters.mesh_info
    if not hasattr(mesh, "shard_process_group"):
        raise UsageError(
            f"{where} is replicated, not sharded: its gradients are all-reduced, for which "
            "SHOAL_WIRE sets a codec"
        )
    if group_in(mesh.shard_process_group, parameters.device) is None:
        raise UsageError(
            f"{where} is sharded over a process group whose backend is not shoal: call "
            'init_process_group("shoal")'
        )


def _check_usual(where: str, comm: object, usual: type) -> None:
    """Raise UsageError unless a collective is torch's own or from this module."""
    if type(comm) not in (usual, _ReduceScatter, _AllGather):
        raise UsageError(
            f"{where} has the collective {type(comm).__name__} in place of torch's, which compress "
            "would replace"
        )


def _check_replicas(where: str, mesh: Any) -> None:
    """Raise UsageError if only some replicas of the parameters would be rounded."""
    if mesh.replicate_mesh_dim is None:
        return
    world = default_group()
    if world is None:
        raise UsageError(f"{where} has replicas: the default process group must use shoal")
    hosts = world.planner.cluster.hosts
    shards = mesh.mesh.mesh.movedim(mesh.shard_mesh_dim, -1).reshape(-1, mesh.shard_mesh_size)
    of_one: dict[bool, list[int]] = {}
    for ranks in shards.tolist():
        of_one[len({hosts[rank] for rank in ranks}) == 1] = ranks
    if len(of_one) > 1:
        raise UsageError(
            f"{where} has a replica on ranks {of_one[True]} of one host and another on ranks "
            f"{of_one[False]} of several hosts: only the second would be rounded, and replicas "
            "would compute with different weights; compress only the gradients"
        )


class _Compressing:
    """One of torch's collectives for one module, with a codec in its calls.

    Args:
        usual: torch's own collective.
        what: the name of its tensors in messages.
        only: the process group whose calls use the codec; None: any.
    """

    def __init__(
        self, usual: Any, codec: Codec, what: str, only: dist.ProcessGroup | None = None
    ) -> None:
        self._usual = usual
        self._codec = codec
        self._what = what
        self._only = only
        self._has_warned = False

    def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
        found: torch.Tensor = self._usual.allocate(*size, **kind)
        return found

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *rest: Any,
        **named: Any,
    ) -> Any:
        codec = self._codec_for(input_tensor, group)
        with contextlib.nullcontext() if codec is None else calls_with(wire=codec):
            return self._usual(output_tensor, input_tensor, group, *rest, **named)

    def _codec_for(self, tensor: torch.Tensor, process_group: dist.ProcessGroup) -> Codec | None:
        """Return the codec of a call; None: send tensors as torch does."""
        # With `reshard_after_forward=n` smaller groups gather parameters again that were rounded
        # before the forward pass. These groups would cut them into different blocks.
        if self._only is not None and process_group is not self._only:
            return None
        group = group_in(process_group, tensor.device)
        if group is None or group.planner.cluster.n_hosts == 1:
            return None
        codec = self._codec
        if codec.is_narrow and tensor.dtype not in _NARROWED:
            self._warn(group, tensor.dtype)
            return None
        is_narrower = codec.bits < 8 * tensor.element_size()
        return codec if is_narrower or not codec.is_narrow else None

    def _warn(self, group: Group, dtype: torch.dtype) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _LOG.log(
            logging.WARNING if group.rank == 0 else logging.DEBUG,
            "%s: the %s are not sent in %s: torch sends them as %s, and codecs take only float32, "
            "bfloat16 and float16",
            *(group, self._what, self._codec, dtype),
        )


# NOT derived from torch's default classes: torch would replace such objects and drop the codec.
class _ReduceScatter(_Compressing, ReduceScatter):
    pass


class _AllGather(_Compressing, AllGather):
    pass
