"""The process group over shoal for torchft's Manager, which heals lost replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from shoal.errors import Closed, UsageError, without_internals
from shoal.frontend.torch import torch_group
from shoal.group.form import form
from shoal.rendezvous import MemoryStore, TorchStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.group.group import Group

__all__ = ["ProcessGroupShoal"]


class ProcessGroupShoal(ProcessGroupWrapper):  # type: ignore[misc]  # mypy does not see torchft
    """A process group that forms a new shoal group each time torchft's Manager configures it.

        manager = torchft.Manager(pg=ProcessGroupShoal(timeout=timedelta(seconds=10)), ...)

    It takes tensors on CPUs and CUDA devices. Reduction servers do not serve it.

    Threads: any may call `abort` and `shutdown`, also while another configures or waits.

    Args:
        timeout: for forming a group, and for each call.

    Raises:
        UsageError: the timeout is not positive, or one of shoal's variables is wrong. From
            `configure` the Manager would log that error and try again without end.
    """

    @without_internals
    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._form(MemoryStore(), 0, 1).close()
        self._n_ends = 0

    _pg: dist.ProcessGroup | None

    @property
    def parent(self) -> dist.ProcessGroup:
        """Return the group that `configure` formed last."""
        group = self._pg
        if group is None:
            raise UsageError(
                "ProcessGroupShoal has no group: torchft's Manager forms one by `configure`, "
                "after it was made and after each `abort` or `shutdown`"
            )
        return group

    def configure(self, *given: Any, **named: Any) -> None:
        """End the group of before and form one; torchft's Manager calls it.

        Raises:
            Closed: another thread called `abort` or `shutdown` meanwhile.
            ShoalError: the group did not form. There is then no group.
        """
        n_ends = self._n_ends
        super().configure(*given, **named)
        if self._n_ends != n_ends:
            self.shutdown()
            raise Closed("ProcessGroupShoal was ended by another thread while it formed a group")

    def _form(self, store: Any, rank: int, size: int) -> Group:
        name = f"torchft quorum {self._quorum_id}"  # NOT "world", which reduction servers serve
        return form(store, rank, size, timeout_s=self._timeout.total_seconds(), name=name)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = self._form(TorchStore(store), rank, world_size)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return torch_group(group, store, self._timeout, devices)

    def abort(self, errored: bool = True) -> None:
        """End everything in flight on every rank with an error, and close the group. Idempotent.

        Args:
            errored: log it; False also leaves a `configure` alone that runs meanwhile.
        """
        self._n_ends += errored
        # NOT left to torchft, which drops whatever group is there once the abort is through.
        group, self._pg = self._pg, None
        super().abort(errored)  # logs it
        if group is not None:
            group.abort()
            group.shutdown()

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self._n_ends += 1
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torchft's name
        """Return the name under which torchft registers the group with torch."""
        return "torchft-shoal"
