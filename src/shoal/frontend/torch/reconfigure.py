"""`torch.distributed._reconfigure`: form a process group's shoal group again, from torch 2.14 on.

The handle of a process is the address of its door (`shoal.rendezvous.door`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from shoal.errors import UsageError
from shoal.group.form import form_at
from shoal.rendezvous.door import Door

if TYPE_CHECKING:
    from shoal.group.group import Group

_HOW: Final = (
    "call torch.distributed._reconfigure, with the handles that _get_reconfigure_handle returns "
    "on its members"
)


class NotFormed:
    """Stands for the group of a process group created with `enable_reconfigure`."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size

    def ended(self) -> None:
        """Return None: no error has ended it."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def abort(self, why: str) -> None:
        """Do nothing: there is nothing to abort."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle look for such names
            raise AttributeError(name)
        raise UsageError(f"group {self.name!r} has not been formed: {_HOW}")


class Reconfiguring:
    """The door of one process group, and the uuids used there."""

    def __init__(self) -> None:
        self._door = Door()
        self._used: set[int] = set()

    @property
    def handle(self) -> str:
        return self._door.address

    def form(self, opts: Any, name: str, timeout_s: float) -> Group:
        """Form the group of torch's ReconfigureOptions; a set of handles is sorted.

        Ignores `hints`. Raises UsageError for a uuid used before, a wrong handle, or a list without
        this process's handle; ShoalError as `form_at`.
        """
        if opts.uuid in self._used:
            raise UsageError(
                f"reconfigure of group {name!r}: uuid {opts.uuid} was already used; pass a new "
                "one, the same on every member"
            )
        self._used.add(opts.uuid)
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if opts.timeout is not None:
            timeout_s = opts.timeout.total_seconds()
        return form_at(self._door, handles, str(opts.uuid), timeout_s=timeout_s, name=name)

    def close(self) -> None:
        """Close the door. Idempotent."""
        self._door.close()
