"""Who is in a group, from its forming to its end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

from shoal.codec import Codec, parse_wire
from shoal.errors import Closed, UsageError
from shoal.group.calls import Calls, ClosedGroup
from shoal.group.context import hash_of
from shoal.group.shrink import Line
from shoal.group.view import View
from shoal.group.work import FOR_EVER_S

if TYPE_CHECKING:
    from typing_extensions import Self

    from shoal.group.context import Context
    from shoal.group.shrink import Pair
    from shoal.plan import Planner


class Members(Calls):
    """The members of one group; `Group` gives them calls.

    `owns_context`: closing it closes the links too.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[int],
        name: str,
        timeout_s: float,
        planner: Planner,
        wire: Codec = Codec.IDENTITY,
        native_id: int | None = None,
    ) -> None:
        super().__init__(context, members, name, timeout_s, planner, wire, native_id)
        self.owns_context = False
        self._view = View(1, tuple(range(self.size)))
        self._first: _First | None = None
        self._next: Self | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group, or the last view of it."""
        if self._next is not None:
            self._next.__exit__(kind, error, trace)
        self.close()

    @property
    def view(self) -> View:
        """Which membership this is of the group that was formed first, and who is left of that."""
        return self._view

    def subgroup(self, ranks: Sequence[int], name: str, *, wire: str | None = None) -> Self:
        """The group of some of this group's ranks; the caller must be one of them.

        Local: nothing is said to anyone, no thread or memory is added. Every member must call it
        with the same ranks in the same order, the same name and the same wire. Who drops it has
        left it, once calls that are in flight have ended.

        Args:
            wire: how large sums travel between hosts; None: as in this group.
        """
        codec = self.wire if wire is None else parse_wire(wire)
        if isinstance(self._native, ClosedGroup):
            raise Closed(self._native.why)
        for rank in ranks:
            self._check_rank(rank, "ranks")
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise UsageError(f"{self}: ranks {list(ranks)} repeat a rank or lack this one")
        members = [self._members[rank] for rank in ranks]
        name = f"{self.name}/{name}"
        planner = self.planner.of(ranks, f"group {name!r}")
        group = type(self)(self._context, members, name, self.timeout_s, planner, codec)
        group.end_with_its_holders()
        return group

    def shrink(self, exclude: Sequence[int] = (), *, timeout_s: float | None = None) -> Self:
        """The group of all ranks of this one that are left; its next view.

        Whoever is left must call it, also ranks whose calls have not failed. It needs no store and
        no rank in particular, goes over the links that stand, and takes further deaths as they
        come. Ranks keep their order; `view` tells which they had. With nobody lost the new group is
        one of the same ranks.

        This group is closed then, and calls of it that are in flight fail. The new one closes the
        links, if this one would have; a `with` statement of this group closes the new one.

        Args:
            exclude: ranks that are to be left out though they live; the same on every rank. They
                must not call it.
            timeout_s: seconds until all survivors must have called it; None takes the group's.

        Raises (this group is as before, and may be shrunk again, but for PeerLost):
            TimedOut: names the ranks that live and did not call it.
            PeerLost: the others go on without this rank. They gave it up, and it had only been
                stopped; or it and another lost each other and nobody else. It can never join them
                again but by a new meeting.
            UsageError: bad arguments.
            Closed: the group was closed, or shrunk before.
        """
        if isinstance(self._native, ClosedGroup):
            raise Closed(self._native.why)
        for rank in exclude:
            self._check_rank(rank, "exclude")
        if self.rank in exclude:
            raise UsageError(f"{self}: exclude names this rank; only the others shrink the group")
        first = self._first = self._first or _First.of(self, self._native.id)
        out = [self._view.ranks[rank] for rank in exclude]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        mesh = self._context.mesh
        if mesh is None:
            raise Closed(f"{self}: it was closed")
        view = first.line.next_view(self._view, out, timeout_s, mesh, str(self))
        self._next = self._enter(view, first)
        native = self._native
        self.abandon(f"it was shrunk: use {self._next.name!r}")
        native.drop()
        return self._next

    def _enter(self, view: View, first: _First) -> Self:
        """The group of a view that its members have agreed on."""
        name = f"{first.name} (view {view.number})"
        group = type(self)(
            self._context,
            [first.members[rank] for rank in view.ranks],
            name,
            self.timeout_s,
            first.planner.of(view.ranks, f"group {name!r}"),
            self.wire,
            native_id=hash_of("view", first.native_id, view.number, *view.ranks),
        )
        group.owns_context, self.owns_context = self.owns_context, False
        group._view, group._first = view, first
        if not group.owns_context:
            group.end_with_its_holders()
        return group

    def abort(self, reason: str = "no reason was given") -> None:
        """End the group on every rank: what is in flight and all later calls raise `Closed`."""
        self._native.abort(reason)

    def close(self) -> None:
        """Leave. Idempotent.

        The group that `form` made, or the last view of it, takes its subgroups and all links with
        it, and peers that still need this rank get `PeerLost`. Leaving a subgroup tells nobody: a
        call of its other members that needs this rank ends at its deadline.
        """
        if self.owns_context:
            self._context.close()
            for group in list(self._context.groups):
                group.abandon("it was closed")
        else:
            native = self._native
            self.abandon("it was closed")  # before it is: other threads may be calling
            native.drop()


class _First(NamedTuple):
    """A group as it was formed, for all its views."""

    name: str
    native_id: int
    members: Sequence[int]
    planner: Planner
    line: Line

    @classmethod
    def of(cls, group: Members, native_id: int) -> _First:
        # NOT with a hold on the group: that has one on this.
        context, members, name = group._context, group._members, group.name
        planner, own, kind = group.planner, group.rank, type(group)

        def pair_with(peer: int) -> Pair:
            pair = sorted((own, peer))
            made = kind(
                context,
                [members[rank] for rank in pair],
                f"{name}, ranks {pair[0]} and {pair[1]}",
                FOR_EVER_S,
                planner,
                native_id=hash_of("pair", native_id, *pair),
            )
            return cast("Pair", made)

        rank_infos = [context.names[member] for member in members]
        return cls(name, native_id, members, planner, Line(own, rank_infos, pair_with))
