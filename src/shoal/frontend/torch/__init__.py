"""The torch.distributed backend, which `import torch` registers (shoal/_autoload.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from shoal.errors import UsageError, without_internals
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import (
    BackedProcessGroup,
    ShoalBackend,
    ShoalProcessGroup,
    devices_alone,
    notice_hooks,
    takes_backends,
)
from shoal.frontend.torch.work_holders import patch_reducers, patch_work_holders
from shoal.group.form import form
from shoal.rendezvous import TorchStore
from shoal.settings import local_nccl

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.group.group import Group

_CPU: Final = torch.device("cpu")

_replacements: Final[list[Group]] = []


@contextlib.contextmanager
def in_place_of_default(group: Group) -> Iterator[None]:
    """Use this group as torch's default group within the context, without connecting ranks."""
    _replacements.append(group)
    try:
        yield
    finally:
        _replacements.clear()


@without_internals
def create_process_group(opts: Any, options: object = None) -> dist.ProcessGroup:
    """Form a group; torch calls it in every process that will be a member.

    A group of new_group uses the connections of the default group if that is a shoal group; else
    its ranks connect through torch's store.

    Args:
        opts: torch's _DistributedBackendOptions.
        options: the user's pg_options: None, or the options of another shoal group.

    Raises:
        UsageError: the options belong to another backend, or SHOAL_LOCAL_NCCL is wrong.
        ShoalError: the ranks could not connect. No group is left behind.
    """
    if options is not None and getattr(options, "backend", None) != "shoal":
        raise UsageError(
            f"shoal cannot use options of type {type(options).__name__}; leave out pg_options"
        )
    local_nccl(os.environ)  # raises before ranks wait
    return torch_group(_form(opts), opts.store, opts.timeout, devices_alone())


def torch_group(
    group: Group, store: Store, timeout: timedelta, devices: Sequence[str] | None
) -> dist.ProcessGroup:
    """Return the process group or backend that owns a group and makes torch's calls on it.

    Args:
        devices: the devices that it serves; None: other backends of torch's group serve some.
    """
    patch_reducers()
    if not takes_backends():
        return ShoalProcessGroup(group, store, timeout)
    patch_work_holders()
    notice_hooks()
    if devices is None:
        return ShoalBackend(group, store, timeout)
    backend = ShoalBackend(group, store, timeout, is_wrapped=False)
    return BackedProcessGroup(backend, store, devices)


def _form(opts: Any) -> Group:
    ranks = list(opts.global_ranks_in_group)
    if getattr(opts, "enable_reconfigure", False):  # from torch 2.14 on
        from shoal.frontend.torch.reconfigure import NotFormed

        return cast("Group", NotFormed("world", opts.group_rank, opts.group_size))
    if _replacements and not ranks:
        return _replacements[0]
    default = default_group() if ranks else None
    if default is not None:
        return default.subgroup(ranks, name=opts.group_id)
    name = opts.group_id if ranks else "world"
    timeout_s = opts.timeout.total_seconds()
    store = TorchStore(opts.store)
    return form(store, opts.group_rank, opts.group_size, timeout_s=timeout_s, name=name)


def default_group() -> Group | None:
    """Return the shoal group in torch's default group, or None."""
    return group_in(dist.group.WORLD) if dist.is_initialized() else None


def group_in(process_group: Any, device: torch.device = _CPU) -> Group | None:
    """Return the shoal group that serves a device in a torch process group, or None."""
    backend = process_group
    if not isinstance(backend, Operations):
        try:
            backend = backend._get_backend(device)
        except RuntimeError:  # no backend for this device
            return None
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        backend = getattr(backend, "wrapped_pg", backend)
    return backend.group if isinstance(backend, Operations) else None


def group_for(user: str, process_group: dist.ProcessGroup | None) -> Group:
    """Return the shoal group in a process group, or in torch's default group.

    Raises UsageError, with the name `user`, if there is no shoal group.
    """
    group = default_group() if process_group is None else group_in(process_group)
    if group is None:
        raise UsageError(
            f"{user}: the process group does not use shoal; create it with "
            'init_process_group("shoal")'
        )
    return group
