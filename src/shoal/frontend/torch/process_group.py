"""The classes through which torch accepts a backend written in Python.

torch 2.11 to 2.13 accept a `ProcessGroup`, which replaces the whole group. Later versions also
accept a `Backend`: shoal gives them both, a group that holds a backend, unless another backend
serves one of the group's devices. `operations.py` has the operations of all of these classes.
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, DebugLevel, Store, get_debug_level

from shoal.errors import UsageError
from shoal.frontend.torch.compiler import not_compiled
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.tensor_buffers import describe
from shoal.frontend.torch.work import FinishedWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shoal.frontend.torch.reconfigure import Reconfiguring
    from shoal.group.group import Group


# The class to derive a Backend from: public after torch 2.15.
_BackendBase: Final[Any] = getattr(dist, "BackendBase", Backend)
_ProcessGroup: Final[Any] = dist.ProcessGroup
_CUSTOM: Final[Any] = _ProcessGroup.BackendType.CUSTOM


@not_compiled
class ShoalBackend(Operations, _BackendBase):  # type: ignore[misc]  # known at run time
    """A shoal group as a torch Backend: cannot be constructed before torch 2.14.

    Args:
        group, store, timeout: as for `Operations`.
        is_wrapped: True if torch's own group holds it, and wraps it to compare calls under
            TORCH_DISTRIBUTED_DEBUG=DETAIL. False: this backend compares them.
    """

    def __init__(
        self, group: Group, store: Store, timeout: timedelta, *, is_wrapped: bool = True
    ) -> None:
        _BackendBase.__init__(self, group.rank, group.size)
        Operations.__init__(self, group, timeout, store)
        self._is_wrapped = is_wrapped
        self._registers = not is_wrapped
        if get_debug_level() == DebugLevel.DETAIL:
            self._compares = not is_wrapped
            if is_wrapped:
                _WRAPPED.add(self)

    supports_splitting = True
    supports_reconfigure = True

    # NOT the C++ methods: they return the numbers passed to the constructor.
    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.group.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size

    def get_reconfigure_handle(self) -> str:
        """Return the handle by which `reconfigure` identifies this process."""
        return self._reconfiguring.handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Form the group again among the processes of `opts.handles`; each of them calls it.

        The old group, if any, closes after the new one has formed. It may be alive, or ended by an
        abort or a lost rank. If this raises, the old group is unchanged.

        Args:
            opts: torch's ReconfigureOptions.

        Raises:
            UsageError: the uuid was used before, or this process's handle is not in the list.
            TimedOut, PeerLost: some members did not call it, or ended.
        """
        group = self._reconfiguring.form(opts, self.group.name, self.group.timeout_s)
        self.group.close()
        self._close_devices()
        self._begin(group, self.group.timeout_s)  # `set_timeout` may have changed it meanwhile
        return FinishedWork([])

    @functools.cached_property
    def _reconfiguring(self) -> Reconfiguring:
        from shoal.frontend.torch.reconfigure import Reconfiguring

        return Reconfiguring()

    def get_error(self) -> Any:
        """Return SUCCESS: calls raise their own errors."""
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def split(self, store: Store, ranks: list[int], opts: Any) -> ShoalBackend:
        """Return a backend for some of this group's ranks; each of these ranks calls it.

        Raises UsageError on any other rank, without effect on these. `opts`: name and timeout.
        """
        if self.rank() not in ranks:
            # NOT None, which C++ expects of its own backends: for one in Python it dereferences it.
            raise UsageError(
                f"{describe(self.group, 'split_group')} got ranks {list(ranks)} without this one; "
                "let only those ranks call it, or use new_group, which every rank calls"
            )
        group = self.group.subgroup(ranks, name=opts.group_name)
        return ShoalBackend(group, store, opts._timeout, is_wrapped=self._is_wrapped)

    def eager_connect_single_device(self, device: object) -> None:
        """Nothing to do: the ranks are connected."""

    def perform_nocolor_split(self, device: object) -> None:
        """Nothing to do on ranks outside of the new group."""

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        _WRAPPED.discard(self)
        Operations.shutdown(self)
        if "_reconfiguring" in vars(self):
            self._reconfiguring.close()

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        _WRAPPED.discard(self)
        Operations.abort(self)


# Keeps backends alive: with TORCH_DISTRIBUTED_DEBUG=DETAIL the wrapper of torch 2.15 does not keep
# their Python half, and then finds no methods. NOT without DETAIL: a dropped group must end.
_WRAPPED: Final[set[ShoalBackend]] = set()


class _OneBackend(_ProcessGroup):  # type: ignore[misc]  # torch's overloads
    """A process group that replaces torch's own.

    Args:
        ranks: this process's rank, and the number of ranks.
        name: used until torch sets another.
        devices: the types of devices that the group serves.
        backend: serves these devices; None: this object serves them.
    """

    def __init__(
        self,
        ranks: tuple[int, int],
        store: Store,
        name: str,
        devices: Iterable[str],
        backend: ShoalBackend | None = None,
    ) -> None:
        # NOT with the store: that constructor makes an object without overridable C++ methods.
        _ProcessGroup.__init__(self, *ranks)
        self._store = store
        self._name = name
        self._description = "undefined"
        # torch also learns the served devices from a type registered without a backend.
        self._set_default_backend(_CUSTOM)
        self._served = list(devices)
        for kind in self._served:
            self._register_backend(torch.device(kind), _CUSTOM, backend)

    def get_group_store(self) -> Store:
        """Return the store with which torch formed the group."""
        return self._store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> _OneBackend | None:
        """Return a group of some of this group's ranks; None if this rank is not one of them.

        Its ranks are numbered in ascending order, as torch does. `opts` and `device_types` are
        ignored.
        """
        if self.rank() not in ranks:
            return None
        made = self._split(sorted(ranks), group_name or "split", timeout)
        made.setGroupName(group_name or "split")
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    splitGroup = split_group  # noqa: N815 - C++ looks for this name

    def _split(self, ranks: list[int], name: str, timeout: timedelta | None) -> _OneBackend:
        raise NotImplementedError

    def setGroupName(self, name: str) -> None:  # noqa: N802 - C++ looks for this name
        """Set the name under which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - C++ looks for this name
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - C++ looks for this name
        """Set the description given to new_group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - C++ looks for this name
        return self._description


@not_compiled
class ShoalProcessGroup(Operations, _OneBackend):
    """A shoal group as a torch ProcessGroup that is its own backend, for torch before 2.14.

    Shutdown closes the group. get_group_store returns the store, through which the GPUs of a host
    find each other.
    """

    def __init__(self, group: Group, store: Store, timeout: timedelta) -> None:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        _OneBackend.__init__(self, (group.rank, group.size), store, group.name, devices)
        Operations.__init__(self, group, timeout, store)

    # torch 2.11 looks for these names, later versions only if the new ones are missing.
    _allgather_base = allgather_into_tensor_coalesced = Operations.all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single
    alltoall_base = Operations.all_to_all_single

    def _split(self, ranks: list[int], name: str, timeout: timedelta | None) -> _OneBackend:
        timeout = timeout or timedelta(seconds=self.group.timeout_s)
        return ShoalProcessGroup(self.group.subgroup(ranks, name=name), self._store, timeout)

    def _get_backend(self, device: torch.device | str) -> ShoalProcessGroup:
        if torch.device(device).type not in self._served:
            # The error that torch's own group raises, which its callers expect.
            served = " and ".join(self._served)
            raise RuntimeError(f"group {self._name!r} serves {served}, not {device}")
        return self


@not_compiled
class BackedProcessGroup(_OneBackend):
    """A ProcessGroup that holds a ShoalBackend, for torch 2.14 and later.

    Calls go directly to the backend and return its works. In torch's own group they pass through
    the dispatcher, which wraps each Work in a holder. Here they do so only if torch has hooks.

    Args:
        backend: owned: shutdown closes its group.
        devices: the types of devices that it serves.
    """

    def __init__(self, backend: ShoalBackend, store: Store, devices: Iterable[str]) -> None:
        ranks, name = (backend.rank(), backend.size()), backend.group.name
        _OneBackend.__init__(self, ranks, store, name, devices, backend)
        self._backend = backend  # torch keeps only its C++ half alive
        self._has_hooks = False
        for each in _OPERATIONS:
            setattr(self, each, getattr(backend, each))

    # NOT stored: `reconfigure` changes both.
    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._backend.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return self._backend.size()

    getRank, getSize = rank, size  # noqa: N815 - C++ looks for these names

    def _run_hooks(self) -> None:
        """Send collectives through torch's dispatcher from now on."""
        if not self._has_hooks:
            self._has_hooks = True
            self._backend._registers = False
            for each in _DISPATCHED:
                delattr(self, each)

    def register_pre_hook(self, *hook: Any) -> Any:
        """Call a hook before each collective, as torch's group does."""
        self._run_hooks()
        return _ProcessGroup.register_pre_hook(self, *hook)

    def register_post_hook(self, *hook: Any) -> Any:
        """Call a hook after the start of each collective, as torch's group does."""
        self._run_hooks()
        return _ProcessGroup.register_post_hook(self, *hook)

    def _split(self, ranks: list[int], name: str, timeout: timedelta | None) -> _OneBackend:
        opts = self._backend.options
        opts.group_name = name
        if timeout is not None:
            opts._timeout = timeout
        made = self._backend.split(self._store, ranks, opts)
        return BackedProcessGroup(made, self._store, self._served)


# The operations of a BackedProcessGroup, under the names that Python and torch's trampoline for a
# ProcessGroup look for; and the operations that the dispatcher has under the same names.
_OPERATIONS: Final = (
    *(name for name, what in vars(Operations).items() if name[0] != "_" and callable(what)),
    *("_start_coalescing", "_end_coalescing", "_set_default_timeout"),
    *("_set_sequence_number_for_group", "_get_sequence_number_for_group"),
    *("reconfigure", "get_reconfigure_handle"),
)
_DISPATCHED: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "scatter", "gather", "barrier"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "all_to_all_single", "send", "recv", "recv_anysource"),
)


def devices_alone() -> list[str] | None:
    """Return the devices of the group that torch is creating; None if others serve some of them.

    torch does not pass them to the function that creates a backend, but a variable of its caller
    has them. If torch renames that variable, it gets only a backend, which works too.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame and frame.f_locals.get("backend_config")
    backends = config.get_device_backend_map() if config else {}
    return list(backends) if {*map(str, backends.values())} == {"shoal"} else None


@functools.cache
def notice_hooks() -> None:
    """Let torch's NaN check and flight recorder observe the calls of BackedProcessGroups.

    They attach themselves in C++, without `register_pre_hook`.
    """
    for kind in ("NanCheckHook", "FlightRecorderHook"):
        hook = getattr(torch._C._distributed_c10d, kind)
        hook.attach = staticmethod(_noticing(hook.attach, kind))


def _noticing(own: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(own)
    def attach(pg: Any, *given: Any, **named: Any) -> Any:
        # torch attaches a flight recorder to every group that it creates, before listing the group.
        # The recorder takes as long as a small call, and shoal has its own record. So it runs only
        # if a variable asks for it, or the program attaches one.
        is_asked_for = kind != "FlightRecorderHook" or pg in dist.distributed_c10d._world.pg_map
        if isinstance(pg, BackedProcessGroup) and (is_asked_for or _recorder_size() > 0):
            pg._run_hooks()
        return own(pg, *given, **named)

    return attach


def _recorder_size() -> int:
    """Return the size of torch's flight recorder if a variable sets it, else 0."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first takes precedence
    return int(next(filter(None, map(os.environ.get, names)), "0"))


@functools.cache
def takes_backends() -> bool:
    """Return True if this torch can call a Backend written in Python."""
    try:
        _BackendBase(0, 1)
    except TypeError:  # torch <= 2.13: no constructor
        return False
    return True
