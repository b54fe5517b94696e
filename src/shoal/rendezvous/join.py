"""Turns a store into a group: one epoch for all, and what every rank must know of every other.

Every rank publishes a record; rank 0 reads all of them and writes the roll, which names the epoch
(meeting.py). Then each rank connects to one other: inside a host to the lowest, over an abstract
Unix socket; the lowest ranks of the hosts over TCP, along a binary tree. Words go up this tree,
each for a rank and all below it, and come down again as one roster (links.py). A group on one host
never listens on TCP; where there are several, every rank does, and goes on for the life of the job:
the native core makes connections there when they are first needed.

    GATHERING   no roll with us on it: some rank has not come
    LINKING     there is one; a link is lacking, or the report of a rank below
    AWAITING    our report is sent; that of the rank above is lacking
    PASSING     we know all; our report to ranks below is on its way
    FORMED

A link that breaks leads from AWAITING back to LINKING, another roll from anywhere before PASSING.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import InternalError, PeerLost, ShoalError, TimedOut, UsageError
from shoal.rendezvous.acceptor import is_out_of_descriptors, run_ready
from shoal.rendezvous.connections import Connections
from shoal.rendezvous.farewell import LAST_WORDS_S, tell
from shoal.rendezvous.handshake import N_NONCE_BYTES
from shoal.rendezvous.key import job_key
from shoal.rendezvous.listener import listen_unix, n_paths, port_range
from shoal.rendezvous.local_bootstrap import HostMemory
from shoal.rendezvous.meeting import MemberMeeting, RootMeeting
from shoal.rendezvous.membership import Membership
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.patience import Rereading, Warnings
from shoal.rendezvous.record import Record, find_host_id
from shoal.rendezvous.roster import MAX_DIGEST_BYTES, Entry, check_addresses
from shoal.rendezvous.store.asking import Asking

if TYPE_CHECKING:
    from shoal.rendezvous.links import TreeLinks
    from shoal.rendezvous.meeting import Meeting
    from shoal.rendezvous.store import Store

_INTRODUCE_AGAIN_S: Final = 0.001  # when sockets took no more: nothing says when they do again
# For which we do not look at our acceptor, while the store shows nobody new.
_LONGEST_WAIT_S: Final = 0.2


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    memory: HostMemory = HostMemory(),  # noqa: B008 - it is constant
    digest: bytes = b"",
    options: JoinOptions | None = None,
) -> Membership:
    """Meet all other ranks and return who they are and where they can be reached.

    Args:
        store: the same for all ranks; a group's own prefix of a shared one. Its calls are made on
            a thread of ours; one that does not return in time stays behind (store/asking.py).
        timeout_s: for the whole of it.
        memory: what the ranks of this host share, made and entered while they meet.
        digest: at most 255 bytes for all other ranks, see `Membership.digests`. It never lies in
            the store, but travels over connections that are authenticated.

    Raises (every socket is closed, the record stays in the store):
        UsageError: a variable is wrong, the keys differ, or the process has no descriptor left;
            here, or on a rank that has told us.
        TimedOut: names the ranks that are missing, why, and what to set; or the store, if it does
            not answer. May come half a second late if the store is slow to say what is missing.
        PeerLost: the store is gone; likewise. Or a rank has told us that it cannot join.

    A rank that fails tells those that have published by then (farewell.py), unless it is for the
    time: it may come again, and the others have deadlines of their own. While a join does not end,
    it warns of what it lacks, see `JoinOptions.warn_s`.

    Returns once every rank has every link that it needs to meet, and listens, so a rank may close
    its group at once without harm to one that is still on its way out of here.

    Cost: two store requests as a rule, and one connection; rank 0 reads the records of all, the
    lowest rank of a host has a connection to each of the others and to three hosts at most.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not in a group of {size}; expected 0 to {size - 1}")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} is not a positive number of seconds")
    if len(digest) > MAX_DIGEST_BYTES:
        raise UsageError(
            f"a settings digest of {len(digest)} bytes; expected at most {MAX_DIGEST_BYTES}"
        )
    chosen = options or JoinOptions()
    asked = Asking(store, time.monotonic() + timeout_s)
    attempt: _Join | None = None
    with contextlib.ExitStack() as on_exit:
        on_exit.callback(asked.close)
        try:
            selector = on_exit.enter_context(selectors.DefaultSelector())
            attempt = _Join(asked, rank, size, memory, digest, chosen, selector)
            on_exit.callback(attempt.close)
            return attempt.run(timeout_s)
        except TimedOut:
            raise
        except BaseException as error:
            why = _in_words(error, rank, size)
            if attempt is None or not attempt.has_lost_one:
                # While the links still stand: who sees them close finds the reason in the store.
                own = None if attempt is None else attempt.nonce
                tell(asked, rank, size, own, chosen.label, why)
            if why is not error:
                raise why from error
            del why  # else the error keeps this frame, and this frame the error
            raise


def _in_words(error: BaseException, rank: int, size: int) -> BaseException:
    """What to raise in the place of this error."""
    if isinstance(error, OSError) and is_out_of_descriptors(error):
        return UsageError(
            f"rank {rank} has no file descriptor left to join a group of {size}: raise `ulimit -n`"
        )
    if type(error) is ShoalError:  # what this machine lacks
        return ShoalError(f"rank {rank} cannot join: {error}")
    return error


class _State(enum.Enum):
    """How far one rank's join has come, see above."""

    GATHERING = enum.auto()
    LINKING = enum.auto()
    AWAITING = enum.auto()
    PASSING = enum.auto()
    FORMED = enum.auto()


class _Join:
    """One rank's side of one meeting."""

    def __init__(
        self,
        store: Asking,
        rank: int,
        size: int,
        memory: HostMemory,
        digest: bytes,
        options: JoinOptions,
        selector: selectors.BaseSelector,
    ) -> None:
        self._state = _State.GATHERING
        self._store, self._digest, self._options = store, digest, options
        self._selector = selector
        self._roster: dict[int, Entry] = {}  # of all ranks, once we know them
        given_key = job_key(options.environ)
        port_range(options.environ), n_paths(options.environ)  # are right, or nothing begins
        host_id = find_host_id(options.environ)
        # From here on nothing may fail but `run`: nobody would close what is open.
        listener, unix_name = listen_unix()
        nonce, label = os.urandom(N_NONCE_BYTES), options.label
        own = Record(size, nonce, host_id, label, unix_name, given_key is not None)
        self._meeting: Meeting = (
            MemberMeeting(store, own, rank, given_key)
            if rank
            else RootMeeting(store, own, given_key)
        )
        self._connections = Connections(
            selector, self._meeting, memory, options, listener, self._lost, self._doubted
        )
        self._reread = Rereading(size)
        self._warnings = Warnings(options, self._connections.explain)
        store.alarm = lambda: self._warnings.warn_if_due(store.silence)

    @property
    def nonce(self) -> bytes:
        """What makes our record ours."""
        return self._meeting.own.nonce

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank has told us that it cannot join."""
        return self._meeting.has_lost_one

    def run(self, timeout_s: float) -> Membership:
        """Go on until the group is formed."""
        explain = self._connections.explain
        try:
            self._meet()
        except TimedOut as late:
            verdict = f"could not join within {timeout_s:.3g} s"
            raise TimedOut(explain(verdict, self._store.silence)) from late
        except PeerLost as lost:
            gone = self._meeting.farewell
            if gone is None:
                verdict = f"had not joined after {self._warnings.elapsed_s:.3g} s"
                lost.reason += f"; by then {explain(verdict, '')}"
            elif not self.has_lost_one:
                # It failed before we came, and without the store it cannot come again.
                raise gone.error() from lost
            raise
        return self._membership()

    def close(self) -> None:
        """Close everything that `run` has not handed out."""
        self._connections.close()

    # The states.

    def _meet(self) -> None:
        if self._meeting.size > 1:
            self._meeting.publish(self._meeting.own)
        self._reread.plan(time.monotonic())
        while self._state is not _State.FORMED:
            now, deadline = time.monotonic(), self._store.deadline
            if now >= deadline:
                self._store.deadline = now + LAST_WORDS_S
                raise TimedOut("time is up")
            until = min(deadline, self._warnings.warn_if_due(""))
            acceptor = self._connections.acceptor
            acceptor.expire(now)
            wake_at = min(until, self._step(now, until), acceptor.next_deadline() or until)
            run_ready(self._selector, max(0.0, wake_at - time.monotonic()))

    def _step(self, now: float, until: float) -> float:
        """What this state has to do; returns when it has again, unless a socket is ready before."""
        links = self._connections.links
        if self._state is _State.GATHERING or links is None:
            return self._gather(now, until)
        if self._state is _State.LINKING:
            return self._link(now, links)
        if self._state is _State.AWAITING:
            return self._await_word(links)
        return self._pass_on(links)

    def _gather(self, now: float, until: float) -> float:
        self._look_around_if_due(now)
        if now >= self._meeting.look_at:
            # NOT waiting in the store while somebody waits at the acceptor.
            is_alone = self._connections.acceptor.next_deadline() is None
            self._look(min(until, self._reread.at, now + _LONGEST_WAIT_S) if is_alone else now)
        if self._state is not _State.GATHERING:
            return now
        return min(self._meeting.look_at, self._reread.at)

    def _link(self, now: float, links: TreeLinks) -> float:
        self._look_around_if_due(now)
        if now >= self._meeting.look_at:
            self._look(now)
            return now  # there may be other links now
        wake_at = self._connections.dial(now)
        links.introduce()
        if links.is_ready:
            return self._give_word(links)
        again_at = now + _INTRODUCE_AGAIN_S if links.is_introducing else float("inf")
        return min(wake_at, again_at, self._meeting.look_at, self._reread.at)

    def _give_word(self, links: TreeLinks) -> float:
        # NOT to those who come now: they may have formed the group already, and mean the native
        # core, which takes over the listeners.
        self._connections.acceptor.shut()
        if links.tree.parent is None:
            return self._conclude(links)
        self._state = _State.AWAITING
        links.give_word(self._entry())
        # The link may have broken: then it says why at once, or never.
        return float("inf") if self._state is _State.AWAITING else 0.0

    def _await_word(self, links: TreeLinks) -> float:
        """NOT asking the store: rank 0 may have formed the group by now, and ended it."""
        return self._conclude(links) if links.roster is not None else float("inf")

    def _conclude(self, links: TreeLinks) -> float:
        self._state = _State.PASSING
        self._roster = links.conclude(self._entry())
        links.pass_on()
        return self._pass_on(links)

    def _pass_on(self, links: TreeLinks) -> float:
        if not links.is_passed_on:
            return float("inf")
        self._state = _State.FORMED
        return 0.0

    def _lost(self) -> None:
        """A link broke."""
        if self._roster:
            return  # it is lost to the group that has formed, or it has left that again
        self._state = _State.LINKING
        self._connections.acceptor.reopen()
        self._reread.at = 0.0  # it may have told why it left

    # The store.

    def _look_around_if_due(self, now: float) -> None:
        if now < self._reread.at:
            return
        self._reread.plan(now)
        self._meeting.look_around()
        if self._meeting.farewell is not None:
            self._warnings.warn_that_one_is_gone(now)
        self._meeting.doubt()
        if self._connections.links is not None:
            self._connections.links.send_who_keeps_us_waiting()

    def _look(self, until: float) -> None:
        before = self._meeting.roll
        self._meeting.look(until)
        roll = self._meeting.roll
        if roll is not None and roll != before:
            self._connections.begin(roll)
            self._reread.start_anew(time.monotonic())
            self._state = _State.LINKING

    def _doubted(self, *, holds_other_key: bool) -> None:
        """A caller is of another epoch: often it has simply seen the roll before we did."""
        now = time.monotonic()
        if holds_other_key:
            self._reread.soon(now)  # it is told at once, and leaves
        elif self._state is _State.LINKING and self._reread.may_be_now(now):
            self._look(now)

    # The end of it.

    def _entry(self) -> Entry:
        """What all others are told of us."""
        own = self._meeting.own
        listens_at = self._connections.listens_at
        return Entry(own.host_id, own.host_label, self._digest, listens_at)

    def _membership(self) -> Membership:
        rank, roll = self._meeting.rank, self._meeting.roll
        if roll is None:
            raise InternalError("a group has formed without a roll")
        check_addresses(self._roster)
        listeners = tuple(each.detach() for each in self._connections.acceptor.hand_over())
        found = Membership(roll, self._roster, rank, self._meeting.job_key, listeners)
        n_local = sum(peer.is_local for peer in found.peers)
        self._options.log.info(
            "rank %d of %d joined epoch %016x in %.1f ms: %d peers on this host, %d on others",
            *(rank, found.size, found.epoch, 1e3 * self._warnings.elapsed_s),
            *(n_local, len(found.peers) - n_local),
        )
        return found
