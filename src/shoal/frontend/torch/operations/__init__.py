"""torch's collectives as calls on a shoal group: written once, for every version of torch.

torch 2.11 to 2.13 reach them through a ProcessGroup, later ones through a Backend, under names that
changed on the way; `process_group.py` has both classes. Each operation takes lists, as torch gives
them, checks what this rank alone can see (`checks.py`), and starts one collective per tensor
(`calls.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend

from shoal.frontend.torch.operations.meeting import Meeting
from shoal.frontend.torch.operations.moving import Moving
from shoal.frontend.torch.operations.pairwise import Pairwise
from shoal.frontend.torch.operations.reducing import Reducing

if TYPE_CHECKING:
    from shoal.group.group import Group

__all__ = ["Operations"]


class Operations(Reducing, Moving, Pairwise, Meeting):
    """The operations of one group.

    Threads: any, as long as every rank issues the same collectives in the same order.
    """

    @property
    def group(self) -> Group:
        """The shoal group underneath."""
        return self._group

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on, give this much time to every call that does not bring its own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self._group.close()

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        self._group.abort("torch.distributed aborted the process group")

    # ---- what torch asks a group about itself ----

    def getBackendName(self) -> str:  # noqa: N802 - torch looks for this name
        """The name under which the backend was registered."""
        return "shoal"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    _supports_time_estimate = False  # its name from torch 2.15 on
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def supports_tensor_alloc(self, device: object) -> bool:
        """Whether tensors for this backend can be had from it."""
        return False

    @property
    def options(self) -> Any:
        """The backend's options, as torch keeps them."""
        options: Any = Backend.Options("shoal", timedelta(seconds=self._timeout_s))
        options.group_name = self._group.name
        return options

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were started."""
        return self._n_calls
