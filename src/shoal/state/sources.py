"""The worlds of this process, as far as they are told of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from shoal.engine import Mesh, RankInfo


class GroupSource(Protocol):
    """A group, as far as it is told of."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def native_id(self) -> int | None:
        """Its number in the native core; None once it is closed."""


class ContextSource(Protocol):
    """A context, as far as it is told of."""

    @property
    def epoch(self) -> int:
        """64 bits, the same on all its ranks."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def names(self) -> Sequence[RankInfo]:
        """Where each rank is."""

    @property
    def groups(self) -> Iterable[GroupSource]:
        """Those that are alive here."""

    @property
    def mesh(self) -> Mesh | None:
        """The links; None once they are closed."""


SOURCES: Final[weakref.WeakSet[ContextSource]] = weakref.WeakSet()
"""The worlds of this process."""
