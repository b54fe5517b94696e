"""Groups that grow: the order of the steps in `growing.py`, and the members' decision.

The old group stands while the new one forms. Then its members vote as they agree on a view after a
loss (view.py), where the highest number that a member asks for counts: a member that has formed the
new group asks for a number, one that has not for the next. If they agree on the first number, all
have formed the new group, and go on in it. Otherwise none does, and they go on in the next view of
the old one (docs/decisions/0077).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, cast

from shoal.errors import Closed, PeerLost, ShoalError, UsageError
from shoal.group.calls import ClosedGroup
from shoal.group.members import Members
from shoal.lazy import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from shoal.group.group import Group
    from shoal.group.members import First
    from shoal.group.view import View
    from shoal.rendezvous.door import Door

_LOG: Final = logging.getLogger("shoal")
_OPENING: Final = threading.Lock()

_TRIES: Final = 2  # in one `grow`: the second one without newcomers that failed
_VOTE_S: Final = 25.0  # from the first member's vote to the last: growing.FORM_S, and more
CONFIRM_S: Final = 20.0
"""Seconds for the first call of the new group."""


class Elastic(Members):
    """The growing of a group; `Group` adds the collectives."""

    _door: Door | None = None
    _heir: Self | None = None  # the group to go on in, after an error of `grow`
    _vote_number: int | None = None  # of the view that means the new group, until the vote ends
    _formed: Group | None = None  # the new group, until then
    _last_warning = ""

    @property
    def address(self) -> str:
        """The address of this rank's door, which newcomers give to `shoal.init(join=)`.

        It is of the form `host:port`. The first use of `address`, `newcomers` or `grow` opens the
        door, as a socket and a thread that sleeps. It stays the same while the group shrinks and
        grows, and closes with the last group.

        Raises:
            UsageError: this is a subgroup, this process cannot listen, or the ranks are on several
                hosts and have no job key.
        """
        return self._open_door().address

    @property
    def newcomers(self) -> tuple[str, ...]:
        """The host names of the newcomers that wait at this rank's door for `grow`.

        Costs a microsecond, and nothing to calls. Ranks may see others: `grow` makes them agree.

        Raises:
            UsageError: as for `address`.
        """
        return tuple(newcomer.host_label for newcomer in self._open_door().newcomers)

    def grow(self, *, timeout_s: float | None = None) -> Self:
        """Let in all newcomers that wait at any rank's door, and return the larger group.

        All ranks call it at the same place among their calls. The members keep their ranks, and
        newcomers follow. Without newcomers it returns this group, and costs as much as a small
        all_gather. Otherwise this group is closed with all its subgroups, and its calls in flight
        fail. A newcomer that fails meanwhile is left out; if none can be let in, this returns the
        next view of this group. A rank that cannot listen logs why, once, and takes part.

        Args:
            timeout_s: seconds until all ranks must have called it; None takes the group's. Forming
                the new group takes up to 40 s more if processes stop answering.

        Raises (then call `reform` or `shrink`):
            PeerLost: a rank is gone.
            TimedOut: a rank did not call it, or did not answer.
            UsageError: this is a subgroup.
            Closed: the group was closed, or has grown or shrunk before.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        group = self
        for _ in range(_TRIES):
            try:
                found = group._grow_once(timeout_s)
            except BaseException:
                if group is not self:
                    self._heir = group
                raise
            if found is None:
                return group
            if found._context is not group._context:
                return found
            lost = sorted(set(group.view.ranks) - set(found.view.ranks))
            if lost:
                self._heir = found
                rank_info = self._context.names[group._members[group.view.ranks.index(lost[0])]]
                where = rank_info.host, rank_info.address
                rank = group.view.ranks.index(lost[0])
                raise PeerLost(rank, *where, "grow", "was lost while the group grew")
            group = found
        return group

    def reform(self, *, timeout_s: float | None = None) -> Self:
        """Shrink the group if it has ended, and let in all newcomers that wait.

        All surviving ranks call it, also after an error of `grow`. Further deaths are handled until
        `timeout_s` has passed.

        Args, Raises: as for `shrink` and `grow`.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        group = self
        try:
            while True:
                try:
                    return group.grow(timeout_s=max(0.001, deadline - time.monotonic()))
                except ShoalError:
                    can_go_on = group._vote_number or group._heir or group.ended()
                    if not can_go_on or time.monotonic() >= deadline:
                        raise
                group = group.shrink(timeout_s=max(0.001, deadline - time.monotonic()))
        except BaseException:
            if group is not self:
                self._heir = group
            raise

    def go_on_from(self, heir: Self) -> None:
        """Have `reform` and `shrink` of this closed group go on from that one, which followed it.

        For a front end that could not put the new group in the place of this one.
        """
        self._heir = heir

    def begin_again(self) -> None:
        """Called instead of `begin` when the group follows another one."""

    def close(self) -> None:
        """As `Members.close`, and close the door."""
        door, self._door = self._door, None
        formed, self._formed = self._formed, None
        if formed is not None:
            formed.close()
        super().close()
        if door is not None:
            door.close()

    def _grow_once(self, timeout_s: float) -> Self | None:
        """Try to grow; return the new group, or the next view of this one; None: no newcomers."""
        if isinstance(self._native, ClosedGroup):
            raise Closed(self._native.why)
        if self._heir is not None:
            raise Closed(f"{self}: it has grown: use {self._heir.name!r}")
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
        try:
            plan = growing.agree(group, asked, address, waiting, timeout_s)
            if plan is None:
                return None
            self._vote_number = plan.number
            with self._warning("could not let in newcomers"):
                name = self.name if first is None else first.name
                self._formed = growing.form_new(group, name, self._door, plan)
        except ShoalError:
            raise
        except BaseException:  # or the others would wait for this rank
            self.abort("a rank was interrupted while the group grew")
            raise
        return self._vote(plan.number, _VOTE_S)

    def _vote(self, number: int, timeout_s: float) -> Self:
        """Agree whether all members have formed the new group; return the group to go on in.

        Raises:
            TimedOut: a member does not vote; this may be called again.
            PeerLost: the others go on without this rank.
        """
        formed = self._formed
        try:
            view = self._next_view(number if formed is not None else number + 1, (), timeout_s)
        except PeerLost:
            self._vote_number, self._formed = None, None
            if formed is not None:
                formed.close()
            raise
        if formed is not None and view.number == number:
            return self._move_to(cast("Self", formed))
        self._vote_number, self._formed = None, None
        if formed is not None:
            formed.close()
        return self._go_on_in(view)

    def _move_to(self, new: Self) -> Self:
        """Close this group in favour of one with newcomers; all members do so."""
        self._next = self._heir = new  # the heir until this returns: Ctrl-C may come meanwhile
        try:
            self._vote_number, self._formed = None, None
            new._door, self._door = self._door, None
            self.close()
            with contextlib.suppress(ShoalError):  # the next call raises it again
                cast("Group", new).barrier(timeout_s=CONFIRM_S)
            new.begin_again()
        except BaseException:
            new.abort("a rank was interrupted while the group grew")
            raise
        self._heir = None
        return new

    def _after_growing(self, timeout_s: float) -> Self | None:
        if self._vote_number is not None:
            return self._vote(self._vote_number, timeout_s)
        heir, self._heir = self._heir, None
        if heir is not None and (heir._vote_number or heir._heir or heir.ended() is not None):
            return heir.shrink(timeout_s=timeout_s)
        return heir

    def _enter(self, view: View, first: First) -> Self:
        group = super()._enter(view, first)
        group._door, self._door = self._door, None
        return group

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Log an error of what this rank tries alone, unless it was the last one; and go on."""
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
        if isinstance(self._native, ClosedGroup):
            raise Closed(self._native.why)
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
