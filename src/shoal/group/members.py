"""The members of a group, from its forming to its end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

from shoal.codec import parse_wire
from shoal.errors import Closed, UsageError
from shoal.group.calls import Calls, ClosedGroup
from shoal.group.context import hash_of
from shoal.group.shrink import Line
from shoal.group.view import View
from shoal.group.work import FOR_EVER_S

if TYPE_CHECKING:
    from typing_extensions import Self

    from shoal.group.group import Group
    from shoal.plan import Planner
    from shoal.state.stats import Stats


class Members(Calls):
    """The members of one group; with `owns_context` its `close` closes the links too."""

    owns_context = False
    _later_view: View | None = None
    _first: First | None = None
    _next: Self | None = None
    _last_stats: Stats | None = None

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
        """The membership of this group: its number, and the ranks of the first group."""
        return self._later_view or View(1, tuple(range(self.size)))

    def subgroup(self, ranks: Sequence[int], name: str, *, wire: str | None = None) -> Self:
        """Return the group of some of this group's ranks; this rank must be one of them.

        It is local: no message, thread or memory. Every member must call it with the same ranks in
        the same order, name and wire. A rank that drops the group leaves it once its calls in
        flight have ended.

        Args:
            wire: the encoding of large sums between hosts; None: as in this group.
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
        """Return the group of all surviving ranks of this group: its next view.

        All survivors must call it, also ranks whose calls have not failed. It needs no store and no
        particular rank, uses the existing links, and handles further deaths. Ranks keep their
        order; `view` has their former ranks. If none is lost, the new group has the same ranks.

        This group is then closed, and its calls in flight fail. The new group closes the links if
        this one would have; a `with` statement of this group closes the new one.

        Args:
            exclude: living ranks to exclude, the same on every rank; they must not call it.
            timeout_s: seconds until all survivors must have called it; None takes the group's.

        After an error this group is as before and can be shrunk again, except after PeerLost. After
        an error of `grow` this returns the group in which all that called `grow` go on.

        Raises:
            TimedOut: names the living ranks that did not call it.
            PeerLost: the others go on without this rank: it was stopped for too long, or it and one
                other rank lost each other. It can only join a new group.
            UsageError: bad arguments.
            Closed: the group was closed, or shrunk before.
        """
        for rank in exclude:
            self._check_rank(rank, "exclude")
        if self.rank in exclude:
            raise UsageError(f"{self}: exclude names this rank; only the others shrink the group")
        regrouped = self._after_growing(self.timeout_s if timeout_s is None else timeout_s)
        if regrouped is not None:
            return regrouped
        if isinstance(self._native, ClosedGroup):
            raise Closed(self._native.why)
        out = [self.view.ranks[rank] for rank in exclude]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._go_on_in(self._next_view(self.view.number + 1, out, timeout_s))

    def _after_growing(self, timeout_s: float) -> Self | None:
        """Return the group to go on in after a growing that raised; None if there was none."""
        raise NotImplementedError

    def _next_view(self, number: int, out: Sequence[int], timeout_s: float) -> View:
        """Agree on a view of at least this number, see `Line.next_view`."""
        mesh = self._context.mesh
        if mesh is None or isinstance(self._native, ClosedGroup):
            raise Closed(f"{self}: it was closed")
        first = self._first = self._first or First.of(self, self._native.id)
        return first.line.next_view(self.view, number, out, timeout_s, mesh, str(self))

    def _go_on_in(self, view: View) -> Self:
        """Leave this group for the next view."""
        assert self._first is not None  # it has agreed on the view
        self._next = self._enter(view, self._first)
        native = self._native
        self.abandon(f"it was shrunk: use {self._next.name!r}")
        native.drop()
        return self._next

    def _enter(self, view: View, first: First) -> Self:
        """Return the group of a view that its members have agreed on."""
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
        group._later_view, group._first = view, first
        if not group.owns_context:
            group.end_with_its_holders()
        return group

    def stats(self) -> Stats:
        """Return what the group does now: calls in flight, whom they wait for, and its links.

        Costs about a millisecond at most, and waits at most 0.25 s for a stuck thread. Any thread
        may call it at any time. docs/top.md describes the numbers.
        """
        from shoal.state.stats import stats_of

        self._last_stats = stats_of(self._context, self, self._last_stats)
        return self._last_stats

    def abort(self, reason: str = "no reason was given") -> None:
        """End the group on every rank: what is in flight and all later calls raise `Closed`."""
        self._native.abort(reason)

    def close(self) -> None:
        """Leave the group. Idempotent.

        The group that `form` made, or its last view, closes its subgroups and all links, and peers
        that still need this rank get `PeerLost`. Leaving a subgroup sends nothing: calls of other
        members that need this rank end at their deadlines.
        """
        if self.owns_context:
            self._context.close()
            for group in list(self._context.groups):
                group.abandon("it was closed")
        else:
            native = self._native
            self.abandon("it was closed")  # first, since other threads may be calling
            native.drop()


class First(NamedTuple):
    """A group as it was formed, shared by all its views."""

    name: str
    native_id: int
    members: Sequence[int]
    planner: Planner
    line: Line

    @classmethod
    def of(cls, group: Members, native_id: int) -> First:
        """Return the start of a line of views, which begins with this group."""
        # NOT a reference to the group, which refers to this.
        context, members, name = group._context, group._members, group.name
        planner, own, kind = group.planner, group.rank, type(group)

        def pair_with(peer: int) -> Group:
            pair = sorted((own, peer))
            made = kind(
                context,
                [members[rank] for rank in pair],
                f"{name}, ranks {pair[0]} and {pair[1]}",
                FOR_EVER_S,
                planner,
                native_id=hash_of("pair", native_id, *pair),
            )
            return cast("Group", made)

        rank_infos = [context.names[member] for member in members]
        return cls(name, native_id, members, planner, Line(own, rank_infos, pair_with))
