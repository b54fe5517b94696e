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

    def broadcast(self, data: Any) -> object:
        """Overwrite `data` with that of rank 0."""

    def reduce(self, data: Any) -> object:
        """Fold `data` over all ranks into that of rank 0."""

    def all_gather(self, outputs: Any, data: Any) -> object:
        """Collect every rank's `data`."""

    def reduce_scatter(self, output: Any, inputs: Any) -> object:
        """Fold one block for each rank."""

    def gather(self, outputs: Any, data: Any) -> object:
        """Collect every rank's `data` at rank 0."""

    def scatter(self, output: Any, inputs: Any) -> object:
        """Deal out rank 0's blocks."""

    def all_to_all(self, outputs: Any, inputs: Any) -> object:
        """Exchange a block with every rank."""

    def barrier(self) -> object:
        """Wait for every rank."""

    def send(self, data: Any, to: int) -> object:
        """Send `data` to one rank."""

    def recv(self, data: Any, source: int, *, work: bool = False) -> Any:
        """Receive from one rank."""
