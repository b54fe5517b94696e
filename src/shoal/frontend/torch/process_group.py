"""The two classes by which torch takes a backend written in Python.

torch 2.11 to 2.13 take a `ProcessGroup`, which replaces the whole group; later versions take a
`Backend` inside torch's own group. `operations.py` has the operations of both.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, DebugLevel, Store, get_debug_level

from shoal.errors import UsageError
from shoal.frontend.torch.compiler import not_compiled
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.tensor_buffers import describe

if TYPE_CHECKING:
    from shoal.group.group import Group


# The class to derive a Backend from: public after torch 2.15.
_BackendBase: Final[Any] = getattr(dist, "BackendBase", Backend)
_ProcessGroup: Final[Any] = dist.ProcessGroup


@not_compiled
class ShoalBackend(Operations, _BackendBase):  # type: ignore[misc]  # known at run time
    """A shoal group as a torch Backend: cannot be constructed before torch 2.14.

    Args:
        group: owned: shutdown closes it.
        store: torch's, by which GPUs of one host find each other.
        timeout: of every call that does not bring its own.
    """

    def __init__(self, group: Group, store: Store, timeout: timedelta) -> None:
        _BackendBase.__init__(self, group.rank, group.size)
        Operations.__init__(self, group, timeout, store)
        if get_debug_level() == DebugLevel.DETAIL:
            _WRAPPED.add(self)

    supports_splitting = True

    def split(self, store: Store, ranks: list[int], opts: Any) -> ShoalBackend:
        """Return the backend of some of this group's ranks, each of which calls it.

        Args:
            opts: its name and timeout.

        Raises:
            UsageError: this rank is not one of them. The others are not affected.
        """
        if self.rank() not in ranks:
            # NOT None, as C++ wants of its own backends: it dereferences that of one in Python.
            raise UsageError(
                f"{describe(self._group, 'split_group')} got ranks {list(ranks)}, of which this is "
                "none; let only those ranks call it, or use new_group, which every rank calls"
            )
        group = self._group.subgroup(ranks, name=opts.group_name)
        return ShoalBackend(group, store, opts._timeout)

    def eager_connect_single_device(self, device: object) -> None:
        """Nothing to do: the ranks are connected."""

    def perform_nocolor_split(self, device: object) -> None:
        """Nothing to do on ranks outside of the new group."""

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        _WRAPPED.discard(self)
        Operations.shutdown(self)

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        _WRAPPED.discard(self)
        Operations.abort(self)


# With TORCH_DISTRIBUTED_DEBUG=DETAIL the wrapper of torch 2.15 does not keep the Python half of a
# backend alive, and then finds no methods. NOT without DETAIL: a dropped group must end.
_WRAPPED: Final[set[ShoalBackend]] = set()


@not_compiled
class ShoalProcessGroup(Operations, _ProcessGroup):  # type: ignore[misc]  # torch's overloads
    """A shoal group as a torch ProcessGroup, which acts as its own backend.

    Args:
        group: owned: shutdown closes it.
        store: given back by get_group_store; by it GPUs of one host find each other.
        timeout: of every call that does not bring its own.
    """

    def __init__(self, group: Group, store: Store, timeout: timedelta) -> None:
        # NOT with the store: that constructor makes an object whose methods C++ cannot override.
        _ProcessGroup.__init__(self, group.rank, group.size)
        Operations.__init__(self, group, timeout, store)
        self._name = group.name
        self._description = "undefined"
        # A type without a backend behind it: torch then sees which devices are served.
        custom = _ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        self._served = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for kind in self._served:
            self._register_backend(torch.device(kind), custom, None)

    # torch 2.11 looks for these names, later versions only if the new ones are not there.
    _allgather_base = allgather_into_tensor_coalesced = Operations.all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single
    alltoall_base = Operations.all_to_all_single

    def get_group_store(self) -> Store:
        """The store that torch formed the group with."""
        store: Store = self._store
        return store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ShoalProcessGroup | None:
        """Return the group of some of this group's ranks; None if this is not one of them.

        `opts` and `device_types` are ignored.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or "split"
        timeout = timeout or timedelta(seconds=self._timeout_s)
        made = ShoalProcessGroup(self._group.subgroup(ranks, name=name), self._store, timeout)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    splitGroup = split_group  # noqa: N815 - C++ looks for this name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - C++ looks for this name
        """Set the name under which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - C++ looks for this name
        """The name under which functional collectives find the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - C++ looks for this name
        """Set the description given to new_group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - C++ looks for this name
        """The description given to new_group."""
        return self._description

    def _get_backend(self, device: torch.device | str) -> ShoalProcessGroup:
        """Return the backend for a device: this object."""
        if torch.device(device).type not in self._served:
            # As torch's own group raises it, for its callers.
            served = " and ".join(self._served)
            raise RuntimeError(f"group {self._name!r} serves {served}, not {device}")
        return self


@functools.cache
def takes_backends() -> bool:
    """Return True if this torch can call a Backend written in Python."""
    try:
        _BackendBase(0, 1)
    except TypeError:  # torch <= 2.13: no constructor
        return False
    return True
