"""The process group over shoal for torchft's Manager, which replaces lost replicas."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from shoal.errors import (
    Closed,
    PeerLost,
    ShoalError,
    Unsupported,
    UsageError,
    without_internals,
)
from shoal.frontend.torch import torch_group
from shoal.group.form import form
from shoal.group.growing import SILENT_S
from shoal.rendezvous import MemoryStore, TorchStore, job_key
from shoal.rendezvous.door import Door, visit
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.record import find_host_id
from shoal.rendezvous.store.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store as TheirStore

    from shoal.group.group import Group
    from shoal.rendezvous import Store

# Seconds for the replicas of a quorum to form a group. The lighthouse sends them the quorum at the
# same time. If one dies before it arrives, only this deadline ends the wait of the others.
_FORM_S: Final = 10.0
_DOOR: Final = "shoal/door"  # the key under which replica 0 writes the meeting's address
_ENDED: Final = "ProcessGroupShoal was ended by another thread while it formed a group"

_REMEDY: Final = (
    "discard this step, as should_commit() does; torchft's Manager forms the next group without it"
)


class ProcessGroupShoal(ProcessGroupWrapper):  # type: ignore[misc]  # mypy does not see torchft
    """A process group that forms a new shoal group each time torchft's Manager configures it.

        manager = torchft.Manager(pg=ProcessGroupShoal(timeout=timedelta(seconds=10)), ...)

    It takes tensors on CPUs and CUDA devices. Reduction servers do not serve it.

    Threads: any may call `abort` and `shutdown`, even while another configures or waits.

    Replicas meet at the door of replica 0. If a replica ends after it arrived there, the forming
    ends on all others at once. If one does not arrive within 10 s, it ends with `TimedOut`.

    Args:
        timeout: for forming a group, up to 10 s, and for each call.

    Raises:
        UsageError: the timeout is not positive, or one of shoal's variables is wrong. NOT raised
            from `configure`: the Manager would log the error and retry forever.
        Unsupported: this version of torchft forms groups by `reconfigure`, as nightly builds do.
        ShoalError: this machine has no memory, descriptors or threads left.
    """

    @without_internals
    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        if not hasattr(ProcessGroupWrapper, "configure"):  # nightly builds since October 2026
            raise Unsupported(
                "ProcessGroupShoal works with torchft 0.2.0; the installed torchft has process "
                "groups without `configure`: pip install torchft==0.2.0"
            )
        super().__init__(timeout)
        self._form(MemoryStore(), 0, 1).close()
        self._n_ends = 0
        self._door: Door | None = None
        self._lock = threading.Lock()  # for the door, which another thread may close
        self._end_visit: Callable[[], None] = lambda: None  # ends the last visit; idempotent

    _pg: dist.ProcessGroup | None

    @property
    def parent(self) -> dist.ProcessGroup:
        """Return the group that `configure` formed last."""
        group = self._pg
        if group is None:
            raise UsageError(
                "ProcessGroupShoal has no group: torchft's Manager forms one with `configure`, "
                "after construction and after each `abort` or `shutdown`"
            )
        return group

    def configure(self, *given: Any, **named: Any) -> None:
        """End the former group and form a new one; torchft's Manager calls it.

        Raises:
            Closed: another thread called `abort` or `shutdown` meanwhile.
            ShoalError: the group did not form. There is then no group.
        """
        n_ends = self._n_ends
        try:
            super().configure(*given, **named)
        except ShoalError as error:
            if isinstance(error, PeerLost):
                error.remedy = _REMEDY
            if self._n_ends == n_ends:
                raise
            raise Closed(_ENDED) from error
        if self._n_ends != n_ends:
            self.shutdown()
            raise Closed(_ENDED)

    def _form(self, store: Store, rank: int, size: int) -> Group:
        name = f"torchft quorum {self._quorum_id}"  # NOT "world", which reduction servers serve
        timeout_s = self._timeout.total_seconds()
        group = form(store, rank, size, timeout_s=min(timeout_s, _FORM_S), name=name)
        group.timeout_s, group.peer_lost_remedy = timeout_s, _REMEDY
        return group

    def _create_pg(self, store: TheirStore, rank: int, world_size: int) -> dist.ProcessGroup:
        if world_size == 1:
            group = self._form(MemoryStore(), rank, world_size)
        else:
            with self._visit(store, rank) as meeting:
                group = self._form(meeting, rank, world_size)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return torch_group(group, store, self._timeout, devices)

    @contextlib.contextmanager
    def _visit(self, store: TheirStore, rank: int) -> Iterator[Store]:
        """Join the meeting of this quorum at the door of replica 0, which opens it."""
        timeout_s = min(self._timeout.total_seconds(), _FORM_S)
        deadline, host_id = time.monotonic() + timeout_s, find_host_id(os.environ)
        with contextlib.closing(Asking(TorchStore(store), deadline)) as asking:
            if rank == 0:
                with self._lock:
                    door = self._door = self._door or Door()
                uuid = os.urandom(16).hex()
                door.open(uuid, SILENT_S)
                asking.set(_DOOR, f"{door.address} {uuid} {host_id}".encode())
            written = asking.get(_DOOR, timeout_s)
        try:
            address, uuid, its_host = written.decode().split(" ", 2)
        except ValueError as error:
            raise UsageError(f"replica 0 wrote {written!r} as the meeting's address") from error
        if its_host != host_id and job_key() is None:
            raise UsageError(f"replicas on several hosts need a job key. {HOW_TO_SET_KEY}")
        left_s = max(0.001, deadline - time.monotonic())
        hold = functools.partial(setattr, self, "_end_visit")
        with visit(address, uuid, left_s, silent_s=SILENT_S, on_connect=hold) as meeting:
            yield meeting
        if rank == 0:  # another meeting under this prefix has another name
            with contextlib.suppress(RuntimeError):  # the replica that serves the store has ended
                store.delete_key(_DOOR)

    def abort(self, errored: bool = True) -> None:
        """End everything in flight on every rank with an error, and close the group. Idempotent.

        Args:
            errored: log it; False also spares a running `configure`.
        """
        self._n_ends += errored
        if errored:
            self._end_visit()
        # NOT left to torchft, which drops any group that exists after the abort.
        group, self._pg = self._pg, None
        super().abort(errored)  # logs it
        if group is not None:
            group.abort()
            group.shutdown()

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self._n_ends += 1
        self._end_visit()
        group, self._pg = self._pg, None
        with self._lock:
            door, self._door = self._door, None
        if group is not None:
            group.shutdown()
        if door is not None:
            door.close()

    def getBackendName(self) -> str:  # noqa: N802 - torchft's name
        """Return the name under which torchft registers the group with torch."""
        return "torchft-shoal"
