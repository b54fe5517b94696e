"""`shoal.torch.shrink_group`: replace torch's default group by a group of its living ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import shoal.frontend.torch as frontend
from shoal.errors import PeerLost, Unsupported, UsageError

if TYPE_CHECKING:
    from shoal.group.group import Group


def peer_lost() -> PeerLost | None:
    """Return the PeerLost error that ended torch's default group, or None.

    Layers such as DistributedDataParallel raise a RuntimeError that only quotes the error. After a
    lost rank call `shrink_group`.
    """
    group = frontend.default_group()
    error = None if group is None else group.ended()
    return error if isinstance(error, PeerLost) else None


def shrink_group(
    ranks_to_exclude: Sequence[int] = (),
    group: dist.ProcessGroup | None = None,
    *,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Replace torch's default group by a group of the surviving ranks, and return it.

    All survivors call it, like `shoal.Group.shrink`. Ranks are renumbered in their old order. All
    other process groups are destroyed, as with `torch.distributed.shrink_group`: create them again,
    and all objects that hold one, such as DistributedDataParallel.

    Args:
        ranks_to_exclude: living ranks to leave out, the same on every rank. Unlike torch's, this
            function finds lost ranks by itself.
        group: None, or the default group.
        timeout: time within which all survivors must call it; None: the default group's timeout.

    Raises:
        UsageError: there is no default group.
        Unsupported: the default group has other backends than shoal, or another group is given.
        TimedOut, PeerLost, UsageError, Closed: as `shoal.Group.shrink`. torch's groups have not
            changed.
        RuntimeError: torch could not replace its default group. The new group is closed.
    """
    old = default_of("shrink_group", group)
    timeout_s = timeout.total_seconds() if timeout is not None else None
    new = old.shrink(ranks_to_exclude, timeout_s=timeout_s)
    store = dist.distributed_c10d._get_default_store()
    replace_default(new, PrefixStore(f"shoal/view/{new.view.number}", store))
    return cast("dist.ProcessGroup", dist.group.WORLD)


def replace_default(new: Group, store: Store) -> None:
    """Make a group torch's default group, and destroy the former one if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        with frontend.in_place_of_default(new):
            dist.init_process_group(
                "shoal",
                store=store,
                rank=new.rank,
                world_size=new.size,
                timeout=timedelta(seconds=new.timeout_s),
            )
    except BaseException:
        new.close()
        raise


def default_of(caller: str, group: dist.ProcessGroup | None = None) -> Group:
    """Return the shoal group in torch's default group.

    Args:
        caller: the name of the calling function, for errors.
        group: the group passed to that function; only the default group is allowed.
    """
    if not dist.is_initialized():
        raise UsageError(f"{caller}: there is no default group; call init_process_group first")
    if group is not None and group is not dist.group.WORLD:
        raise Unsupported(
            f"{caller}: only the default group can be shrunk; shrink it, and create this one again "
            "with dist.new_group"
        )
    old = frontend.default_group()
    config = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if old is None or set(config.values()) != {"shoal"}:
        raise Unsupported(
            f"{caller}: the default group's backends are {dist.get_backend_config()!r}, but only "
            "shoal groups can shrink or grow"
        )
    return old
