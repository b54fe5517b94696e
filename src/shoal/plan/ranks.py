"""What the planner needs of a group to measure it; `shoal.group.Group` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shoal.plan.planner import Planner


class Group(Protocol):
    """Ranks that do collectives together; arguments as those of `shoal.group.Group`."""

    name: str
    rank: int
    size: int
    planner: Planner

    def plan_by(self, planner: Planner) -> None:
        """Choose by another planner from now on."""

    def all_reduce(self, data: Any, op: Any = ...) -> object:
        """Fold `data` over all ranks."""

    def barrier(self) -> object:
        """Wait for every rank."""

    def send(self, data: Any, to: int) -> object:
        """Send `data` to one rank."""

    def recv(self, data: Any, source: int, *, work: bool = False) -> Any:
        """Receive from one rank."""
