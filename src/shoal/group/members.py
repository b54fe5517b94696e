"""The members of a group: how it shrinks and grows, and how it ends.

Survivors agree on the next view (view.py, shrink.py). A group grows by the steps in growing.py: the
old group stands while the new one forms. Then its members vote, as they agree on a view: each asks
for a number, and the highest counts. A member that has formed the new group asks for number n, one
that has not for n + 1. If they agree on n, all have formed the new group, and go on in it. If they
agree on n + 1, all go on in the next view of the old group (docs/decisions/0077).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from shoal.codec import parse_wire
from shoal.errors import Closed, PeerLost, ShoalError, UsageError
from shoal.group.calls import Calls
from shoal.group.context import hash_of
from shoal.group.shrink import Line
from shoal.group.view import View
from shoal.group.work import FOR_EVER_S
from shoal.lazy import load

if TYPE_CHECKING:
    from typing_extensions import Self

    from shoal.group.group import Group
    from shoal.plan import Planner
    from shoal.rendezvous.door import Door
    from shoal.state.stats import Stats

_LOG: Final = logging.getLogger("shoal")
_OPENING: Final = threading.Lock()

_TRIES: Final = 2  # in one `grow`; the second leaves out newcomers that failed
_VOTE_S: Final = 25.0  # from the first member's vote to the last; longer than growing.FORM_S
CONFIRM_S: Final = 20.0
"""Seconds for the first call of the new group."""


class Members(Calls):
    """The members of one group; with `owns_context` its `close` closes the links too."""

    owns_context = False
    _later_view: View | None = None
    _first: First | None = None
    _next: Self | None = None  # the view or the larger group that followed this group
    _is_unfinished = False  # the last `grow`, `reform` or `shrink` of this group raised
    _door: Door | None = None
    _vote_number: int | None = None  # the view number that stands for the new group in a vote
    _formed: Group | None = None  # the new group, until the vote ends
    _last_warning = ""
    _last_stats: Stats | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the group and the last view of it."""
        self._latest.close()  # NOT one by one: a long job regroups a thousand times
        self.close()

    @property
    def view(self) -> View:
        """The membership of this group: its number, and the ranks of the first group."""
        return self._later_view or View(1, tuple(range(self.size)))

    def subgroup(self, ranks: Sequence[int], name: str, *, wire: str | None = None) -> Self:
        """Return the group of some of this group's ranks; this rank must be one of them.

        Making it is local: no message, thread or memory. Every member must call it with the same
        ranks in the same order, name and wire. A rank that drops the group leaves it once its calls
        in flight have ended.

        Args:
            ranks: of this group; their order gives the ranks in the new group.
            wire: the encoding of large sums between hosts; None: as in this group.

        Raises:
            UsageError: `ranks` repeats a rank, leaves out this one or has an unknown one, or there
                is no such wire.
            Closed: this group was closed.
        """
        codec = self.wire if wire is None else parse_wire(wire)
        self._check_open()
        for rank in ranks:
            self._check_rank(rank, "ranks")
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise UsageError(f"{self}: ranks {list(ranks)} repeat a rank or leave out this one")
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
        order; `view` has their former ranks. If no rank is lost, the new group has the same ranks.

        This group is then closed, and its calls in flight fail. The new group closes the links if
        this one would have; a `with` statement of this group closes the new one.

        Args:
            exclude: living ranks to exclude, the same on every rank; they must not call it.
            timeout_s: seconds until all survivors must have called it; None takes the group's.

        After an error this group is as before and can be shrunk again, except after PeerLost. If
        another group has followed this one, returned by `grow`, `reform` or an earlier call (or not
        returned, because of an error or Ctrl-C), this returns that group, shrunk if it has ended or
        has a rank to exclude.

        Raises:
            TimedOut: names the living ranks that did not call it.
            PeerLost: the others go on without this rank: it was stopped for too long, or lost its
                link to one other rank. It can only join a new group.
            UsageError: bad arguments.
            Closed: the group was closed.
        """
        for rank in exclude:
            self._check_rank(rank, "exclude")
        if self.rank in exclude:
            raise UsageError(f"{self}: exclude names this rank; only the others shrink the group")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        latest, out = self._latest, self._ranks_in_latest(exclude)
        with self._regrouping():
            if (number := latest._vote_number) is not None:
                voted, latest = latest, latest._vote(number, timeout_s, out)
                if latest._context is voted._context or not out:
                    return latest
                # It has grown, and its members have kept their ranks.
            elif latest is not self and latest._is_whole and not out:
                return latest
            out = [latest.view.ranks[rank] for rank in out]
            number = latest.view.number + 1
            left_s = max(0.001, deadline - time.monotonic())
            return latest._go_on_in(latest._next_view(number, out, left_s))

    def _ranks_in_latest(self, ranks: Sequence[int]) -> list[int]:
        """Translate ranks of this group to ranks of `_latest`; drop those that are lost."""
        group, found = self, list(ranks)
        while (after := group._next) is not None:
            if after._context is group._context:  # else it has grown, and members keep their ranks
                first = [group.view.ranks[rank] for rank in found]
                found = [after.view.ranks.index(one) for one in first if one in after.view.ranks]
            group = after
        return found

    @property
    def _latest(self) -> Self:
        """The last group that followed this one; this group if no other has."""
        group = self
        while group._next is not None:
            group = group._next
        return group

    @property
    def _is_whole(self) -> bool:
        """True if the group needs no `shrink`; Closed if it was closed."""
        self._check_open()
        return self._vote_number is None and self.ended() is None

    @contextlib.contextmanager
    def _regrouping(self) -> Iterator[None]:
        """End the latest group if Ctrl-C ends the block, since others may wait for this rank there.

        Then they call `reform` or `shrink` too. NOT after the block: they may be far on in that
        group, and this group's next `grow`, `reform` or `shrink` returns it.
        """
        try:
            yield
        except ShoalError:
            self._is_unfinished = True
            raise
        except BaseException:
            self._latest.abort("a rank was interrupted while the group shrank or grew")
            raise
        self._is_unfinished = False

    def _next_view(self, number: int, out: Sequence[int], timeout_s: float) -> View:
        """Agree on a view of at least this number, see `Line.next_view`."""
        native, mesh = self._check_open(), self._context.mesh
        if mesh is None:
            raise Closed(f"{self}: it was closed")
        first = self._first = self._first or First.of(self, native.id)
        return first.line.next_view(self.view, number, out, timeout_s, mesh, str(self))

    def _go_on_in(self, view: View) -> Self:
        """Leave this group for the next view."""
        assert self._first is not None  # it has agreed on the view
        self._next = self._enter(view, self._first)
        self.owns_context, self._door = False, None  # NOT sooner: Ctrl-C would lose them
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
        group.owns_context, group._door = self.owns_context, self._door
        group._later_view, group._first = view, first
        if not group.owns_context:
            group.end_with_its_holders()
        return group

    @property
    def address(self) -> str:
        """The address of this rank's door, for newcomers to pass to `shoal.init(join=)`.

        It has the form `host:port`. The first use of `address`, `newcomers` or `grow` opens the
        door: a socket, and a thread that sleeps. The door stays open while the group shrinks and
        grows, and closes with the last group.

        Raises:
            UsageError: this is a subgroup, this process cannot listen, or the ranks are on several
                hosts and have no job key.
            ShoalError: no thread can be started.
            Closed: the group was closed.
        """
        return self._open_door().address

    @property
    def newcomers(self) -> tuple[str, ...]:
        """The host names of the newcomers that wait at this rank's door for `grow`.

        Costs a microsecond, and does not slow calls. May differ by rank; `grow` makes ranks agree.

        Raises:
            UsageError, ShoalError, Closed: as for `address`.
        """
        return tuple(newcomer.host_label for newcomer in self._open_door().newcomers)

    def grow(self, *, timeout_s: float | None = None) -> Self:
        """Let in all newcomers that wait at any rank's door, and return the larger group.

        All ranks call it at the same place among their calls. Members keep their ranks, and
        newcomers get the next ones. Without newcomers it returns this group, and costs as much as a
        small all_gather. Otherwise this group is closed with all its subgroups, and its calls in
        flight fail. A newcomer that fails meanwhile is left out; if no newcomer can be let in, this
        returns the next view of this group. A rank that cannot listen logs the reason once, and
        takes part.

        Args:
            timeout_s: seconds until all ranks must have called it; None takes the group's. If
                processes stop answering, forming the new group takes about 40 s more, twice if a
                newcomer fails the first time, and its first call up to 20 s.

        Raises (then call `reform` or `shrink`):
            PeerLost: a rank is gone.
            TimedOut: a rank did not call it, or did not answer.
            UsageError: this is a subgroup; or members and newcomers are too many for a door.
            Closed: the group was closed.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        group = self._latest
        if group is not self and not self._is_unfinished and group._is_whole:
            return group
        with self._regrouping():
            for _ in range(_TRIES):
                found = group._grow_once(timeout_s)
                if found is None or found._context is not group._context:
                    return found or group
                lost = sorted(set(group.view.ranks) - set(found.view.ranks))
                if lost:
                    rank = group.view.ranks.index(lost[0])
                    host, address, *_ = self._context.names[group._members[rank]]
                    raise PeerLost(rank, host, address, "grow", "was lost while the group grew")
                group = found
            return group

    def reform(self, *, timeout_s: float | None = None) -> Self:
        """Shrink the group if it has ended, and let in all newcomers that wait.

        All surviving ranks call it, also after an error of `grow`. Further deaths are handled until
        `timeout_s` has passed.

        Args, Raises: as for `shrink` and `grow`. The last `grow` in it may take longer than
            `timeout_s`, as described there.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        group = self._latest
        if group is not self and not self._is_unfinished and group._is_whole:
            return group
        with self._regrouping():
            while True:
                try:
                    return group.grow(timeout_s=max(0.001, deadline - time.monotonic()))
                except ShoalError:
                    can_go_on = group._next or group._vote_number or group.ended()
                    if not can_go_on or time.monotonic() >= deadline:
                        raise
                group = group.shrink(timeout_s=max(0.001, deadline - time.monotonic()))

    def begin_again(self) -> None:
        """Called instead of `begin` when the group follows another group."""

    def _grow_once(self, timeout_s: float) -> Self | None:
        """Try to grow; return the new group, or the next view of this one; None: no newcomers."""
        self._check_open()
        if self._vote_number is not None:
            return self._vote(self._vote_number, timeout_s)
        self._check_can_grow()
        growing = load("shoal.group.growing")
        group = cast("Group", self)
        address = ""
        with self._warning("cannot listen for newcomers"):
            address = self.address
        first = self._first
        asked = self.view.number if first is None else first.line.number
        waiting = self._door.newcomers if self._door is not None else ()
        plan = growing.agree(group, asked, address, waiting, timeout_s)
        if plan is None:
            return None
        self._vote_number = plan.number
        with self._warning("could not let in newcomers"):
            name = self.name if first is None else first.name
            self._formed = growing.form_new(group, name, self._door, plan)
        return self._vote(plan.number, _VOTE_S)

    def _vote(self, number: int, timeout_s: float, out: Sequence[int] = ()) -> Self:
        """Vote whether all members have formed the new group; return the group to go on in.

        The ranks `out` have no vote. A larger group still has them, and has ended.

        Raises:
            TimedOut: a member did not vote; this may be called again.
            PeerLost: the others go on without this rank.
        """
        formed = self._formed
        try:
            # NOT number + 1 because of `out`: others may have gone on in the new group already.
            asked = number if formed is not None else number + 1
            gone = [self.view.ranks[rank] for rank in out]
            view = self._next_view(asked, gone, timeout_s)
        except PeerLost:
            self._end_vote()
            raise
        if formed is not None and view.number == number:
            return self._move_to(cast("Self", formed), out)
        self._end_vote()
        return self._go_on_in(view)

    def _end_vote(self) -> None:
        """Close the new group, which not all members have formed."""
        formed, self._vote_number, self._formed = self._formed, None, None
        if formed is not None:
            formed.close()

    def _move_to(self, new: Self, out: Sequence[int] = ()) -> Self:
        """Close this group and go on in one with newcomers; all members except `out` do so.

        With ranks `out`, end the new group at once: its newcomers leave, and ask for entry again.
        """
        new._door = self._door  # NOT after the next line: newcomers wait there
        self._next = new
        try:
            self._door, self._vote_number, self._formed = None, None, None
            self.close()
            if out:
                new.abort(f"it is shrunk without ranks {list(out)}")
                return new
            with contextlib.suppress(ShoalError):  # the next call raises the error again
                cast("Group", new).barrier(timeout_s=CONFIRM_S)
            new.begin_again()
        except BaseException:
            new.abort("a rank could not go on in the group that has grown")
            raise
        return new

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Log an error of the block, unless it repeats the last one, and go on."""
        try:
            yield
        except (ShoalError, OSError) as error:
            text = f"{self} {what}: {error}"
            if text != self._last_warning:
                _LOG.warning("%s", text)
            self._last_warning = text

    def _open_door(self) -> Door:
        with _OPENING:
            if self._door is None:
                self._door = self._new_door()
            return self._door

    def _check_can_grow(self) -> None:
        if not self.owns_context:
            raise UsageError(f"{self}: only the group that init returned can grow, or a view of it")

    def _new_door(self) -> Door:
        self._check_open()
        self._check_can_grow()
        rendezvous, growing = load("shoal.rendezvous.door"), load("shoal.group.growing")
        if self.planner.cluster.n_hosts > 1 and load("shoal.rendezvous.key").job_key() is None:
            raise UsageError(
                f"{self}: a group on several hosts lets newcomers in only with a job key: set "
                "SHOAL_KEY_FILE to the same file of mode 0600 on every host"
            )
        name = self._first.name if self._first is not None else self.name
        door = cast("Door", rendezvous.Door())
        digest = self._context.digests[self._context.rank]
        door.take_newcomers(functools.partial(growing.refusal_of, name, digest))
        return door

    def stats(self) -> Stats:
        """Return the group's state: its calls in flight, the ranks they wait for, and its links.

        Costs about a millisecond at most, and waits at most 0.25 s for a stuck thread. Any thread
        may call it at any time. docs/top.md describes the numbers.
        """
        from shoal.state.stats import stats_of

        self._last_stats = stats_of(self._context, self, self._last_stats)
        return self._last_stats

    def abort(self, reason: str = "no reason was given") -> None:
        """End the group on every rank: calls in flight and all later calls raise `Closed`.

        Does not wait. Does nothing if the group was closed; if it has ended, its first error stays.

        Args:
            reason: part of the error's text on every rank.
        """
        self._native.abort(reason)

    def close(self) -> None:
        """Leave the group. Idempotent.

        Closing the group that `form` made, or its last view, also closes its subgroups, the door
        and all links; peers that still need this rank get `PeerLost`. It waits until living peers
        have acknowledged all data, for as long as reconnecting may take: 2 s and `SHOAL_RESUME_S`
        more, at least 12 s. Closing a subgroup sends nothing and does not wait: calls of other
        members that need this rank end at their deadlines.

        Calls in flight on this rank raise `Closed`; their buffers are not borrowed any more.
        """
        door, self._door = self._door, None
        self._end_vote()
        if self.owns_context:
            self._context.close()
            for group in list(self._context.groups):
                group.abandon("it was closed")
        else:
            native = self._native
            self.abandon("it was closed")  # first, since other threads may be calling
            native.drop()
        if door is not None:
            door.close()


class First(NamedTuple):
    """A group as it was formed, shared by all its views."""

    name: str
    native_id: int
    members: Sequence[int]
    planner: Planner
    line: Line

    @classmethod
    def of(cls, group: Members, native_id: int) -> First:
        """Return the first group of a line of views: this group."""
        # NOT a reference to the group: the group refers to this, and the cycle would keep both.
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
