"""Forms a group through a store: ranks agree on one epoch, and learn the addresses of all others.

Every rank joins an attempt (attempt.py) and publishes a record there; rank 0 reads all records and
writes the roll, which determines the epoch (meeting.py). Then each rank connects to one other:
inside a host to the lowest rank, over an abstract Unix socket; the lowest ranks of the hosts over
TCP, along a binary tree. Reports go up this tree, each for a rank and all ranks below it, and come
back as one roster (links.py). A group on one host never listens on TCP. In a group on several hosts
every rank listens for the life of the job: the native core makes connections there at first use.

A link that breaks before its lower end has reported is made again. A link that breaks later ends
the attempt, and all ranks meet again in the next: other ranks counted on the lost one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from shoal.engine import N_NONCE_BYTES
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.rendezvous.attempt import (
    LAST_WORDS_S,
    Attempt,
    AttemptOverError,
    PlaceTakenError,
    find_attempt,
    meet_again,
    report_failure,
)
from shoal.rendezvous.connections import Connections, LinkLostError
from shoal.rendezvous.key import job_key
from shoal.rendezvous.listener import (
    is_out_of_descriptors,
    listen_unix,
    port_range,
    wait_for,
)
from shoal.rendezvous.meeting import MemberMeeting, RootMeeting
from shoal.rendezvous.membership import Membership
from shoal.rendezvous.options import HostMemory, JoinOptions
from shoal.rendezvous.record import Record, find_host_id
from shoal.rendezvous.roster import MAX_DIGEST_BYTES, Entry, check_addresses
from shoal.rendezvous.store.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.rendezvous.links import TreeLinks
    from shoal.rendezvous.meeting import Meeting
    from shoal.rendezvous.roll import Roll
    from shoal.rendezvous.store import Store

# The longest wait in the store, during which callers get no answer.
_LONGEST_WAIT_S: Final = 0.2
# A rank that makes no progress checks in the store whether its attempt has ended: at first after
# the time that most joins take altogether, then less and less often.
_FIRST_LOOK_S: Final = 0.02
_LONGEST_LOOK_S: Final = 1.0
_PER_RANK_S: Final = 0.002  # so that a large group does not flood its store
# From one attempt to the next; doubles.
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 2.0


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
    """Meet all other ranks and return their identities and addresses.

    Args:
        store: the same for all ranks; for a shared store, a prefix of the group's own. Calls run on
            a separate thread; one that does not return in time is left behind (store/asking.py).
        timeout_s: seconds for the complete join.
        memory: the memory that the ranks of this host share, made and entered while they meet.
        digest: at most 255 bytes for all other ranks, see `Membership.digests`. It is never in the
            store; it is sent only over authenticated connections.

    Raises (every socket is closed, the record stays in the store):
        UsageError: a variable is wrong, the keys differ, or the process has no descriptor left;
            here, or on another rank of the attempt.
        TimedOut: names the missing ranks, the reasons, and what to set; or the store, if it does
            not answer. May be half a second late if the store answers slowly.
        PeerLost: the store is gone; names the missing ranks too. Or another rank of the attempt
            cannot join.

    A rank that fails reports its error to the others of its attempt, except after a timeout: it may
    try again, and the others have their own deadlines. A join that takes long warns of the missing
    ranks, see `JoinOptions.warn_s`.

    Returns once every rank has every link that it needs to meet, and listens, so a rank may close
    its group at once without harm to a rank that has not returned from here yet.

    Cost: usually five store requests and one connection. Rank 0 reads the records of all ranks; the
    lowest rank of a host has a connection to each of the others and to at most three hosts.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not in a group of {size}; expected 0 to {size - 1}")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} is not a positive number of seconds")
    if len(digest) > MAX_DIGEST_BYTES:
        raise UsageError(
            f"a settings digest of {len(digest)} bytes; expected at most {MAX_DIGEST_BYTES}"
        )
    asked = Asking(store, time.monotonic() + timeout_s)
    with contextlib.closing(asked):
        joining = _Join(asked, rank, size, memory, digest, options or JoinOptions())
        with contextlib.closing(joining):
            try:
                return joining.run(timeout_s)
            except TimedOut:
                raise
            except BaseException as error:
                why = _in_words(error, rank, size)
                is_taken = isinstance(error, PlaceTakenError)
                # NOT after the links close: the others would see that first.
                joining.report_failure(error if is_taken else why)
                if why is not error:
                    raise why from error
                del why  # else the error and this frame keep each other alive
                raise


def _in_words(error: BaseException, rank: int, size: int) -> BaseException:
    """Return the exception to raise instead of this one."""
    if isinstance(error, OSError) and is_out_of_descriptors(error):
        return UsageError(
            f"rank {rank} has no file descriptor left to join a group of {size}: raise `ulimit -n`"
        )
    if isinstance(error, PlaceTakenError):
        return UsageError(str(error))
    if type(error) is ShoalError:  # this machine is out of a resource
        return ShoalError(f"rank {rank} cannot join: {error}")
    return error


class _Join:
    """One rank's part in one meeting, over as many attempts as needed."""

    def __init__(
        self,
        store: Asking,
        rank: int,
        size: int,
        memory: HostMemory,
        digest: bytes,
        options: JoinOptions,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._memory, self._digest, self._options = memory, digest, options
        self._attempt: int | None = None  # the attempt that this rank has joined
        self._meeting: Meeting | None = None
        self._connections: Connections | None = None
        self._look_around_at = 0.0
        self._look_s = _FIRST_LOOK_S
        self._warnings = Warnings(options.warn_s, options.log)
        self._has_warned_of_gone = False  # a rank that failed before this one joined
        store.alarm = lambda: self._warn_if_due(store.silence)

    def report_failure(self, error: BaseException) -> None:
        """End the attempt with this error, so that the others do not wait for this rank."""
        if self._size > 1:
            report_failure(self._store, self._rank, self._options.label, error, self._attempt)

    def close(self) -> None:
        """Close all sockets that `run` has not handed over."""
        if self._connections is not None:
            self._connections.endpoint.close()

    def run(self, timeout_s: float) -> Membership:
        """Run attempts until the group has formed."""
        try:
            return self._run()
        except TimedOut as late:
            verdict = f"could not join within {timeout_s:.3g} s"
            self._store.deadline = time.monotonic() + LAST_WORDS_S
            text = self._explain(verdict, self._store.silence)
            if self._store.lost:  # while `_explain` read from it
                rank, host, address, doing, why = self._store.lost
                raise PeerLost(rank, host, address, doing, f"{why}; by then {text}") from late
            raise TimedOut(text) from late
        except PeerLost as lost:
            before = None if self._meeting is None else self._meeting.before
            if self._store.lost and before is not None and before.is_failure:
                raise before.error() from lost  # without the store it cannot join again
            if self._store.lost:
                verdict = f"had not joined after {self._warnings.elapsed_s:.3g} s"
                lost.reason += f"; by then {self._explain(verdict, '')}"
            raise

    def _run(self) -> Membership:
        given_key = job_key(self._options.environ)
        port_range(self._options.environ)  # may raise UsageError
        host_id, left = find_host_id(self._options.environ), -1
        pause_s, pause = _FIRST_PAUSE_S, threading.Event()  # never set
        while True:
            attempt = self._find_attempt(left)
            try:
                return self._meet(attempt, host_id, given_key)
            except AttemptOverError:
                pass
            except LinkLostError as lost:
                if lost.has_reported:
                    self.close()  # first of all: this rank's report must not count any more
                self._end_attempt(attempt, str(lost))
            self.close()
            left = attempt.number
            pause.wait(min(pause_s, max(0.0, self._store.deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # Attempts.

    def _find_attempt(self, left: int) -> Attempt:
        if self._size == 1:
            return Attempt()  # a single rank needs no store
        found = find_attempt(self._store, self._rank, self._options.label, left)
        self._attempt = found.number
        return found

    def _end_attempt(self, attempt: Attempt, why: str) -> None:
        """End the attempt after a lost link: all meet again, unless the other rank has failed."""
        if self._meeting is not None:
            with contextlib.suppress(AttemptOverError):
                self._meeting.check_end()
                meet_again(self._store, attempt.number, self._rank, self._options.label, why)

    def _meet(self, attempt: Attempt, host_id: str, given_key: bytes | None) -> Membership:
        listener, unix_name = listen_unix()
        nonce, label = os.urandom(N_NONCE_BYTES), self._options.label
        own = Record(self._size, nonce, host_id, label, unix_name, given_key is not None)
        meeting: Meeting = (
            MemberMeeting(self._store, attempt, self._rank, own, given_key)
            if self._rank
            else RootMeeting(self._store, attempt, own, given_key)
        )
        self._meeting = meeting
        with contextlib.closing(listener):  # no effect once the endpoint owns it
            connections = Connections(
                meeting, self._memory, self._options, listener, self._look_around_soon
            )
        self._connections = connections
        if self._size > 1:
            meeting.publish(own)
        self._look_s = _FIRST_LOOK_S
        self._plan_to_look_around()
        roll = self._gather(meeting, connections)
        links = self._link(meeting, connections, roll)
        # NOT accepting callers from now on: they may have formed the group already, and want the
        # native core, which takes over the listeners.
        connections.endpoint.shut()
        entry = Entry(host_id, label, self._digest, connections.listens_at)
        if links.tree.parent is not None:
            links.send_report(entry)
            self._turn_until(lambda: links.roster is not None, meeting)
        roster = links.conclude(entry)
        self._turn_until(lambda: links.is_passed_on, meeting)
        check_addresses(roster)
        listeners = tuple(connections.endpoint.hand_over())
        return self._log(Membership(roll, roster, self._rank, meeting.job_key, listeners))

    def _gather(self, meeting: Meeting, connections: Connections) -> Roll:
        """Wait for the roll and return it."""
        while meeting.roll is None:
            self._look_around_if_due(meeting)
            now = time.monotonic()
            if now >= meeting.look_at:
                # NOT waiting in the store during a caller's handshake.
                is_alone = not connections.endpoint.n_pending
                until = min(self._look_around_at, self._warn_if_due(""), now + _LONGEST_WAIT_S)
                meeting.look(min(until, self._store.deadline) if is_alone else now)
            if meeting.roll is None:
                self._turn(min(meeting.look_at, self._look_around_at))
        return meeting.roll

    def _link(self, meeting: Meeting, connections: Connections, roll: Roll) -> TreeLinks:
        """Wait until all ranks below have reported, and this rank is linked to the one above."""
        links = connections.begin(roll)
        self._look_s = _FIRST_LOOK_S
        self._plan_to_look_around()
        was_ready = False
        while not (was_ready and links.is_ready):
            # One more turn when all have reported, to notice a rank that has died since: a step
            # reads one message of each link.
            was_ready = links.is_ready
            self._look_around_if_due(meeting)
            now = time.monotonic()
            look_at = min(connections.dial(roll, now), self._look_around_at)
            self._turn(now if was_ready else look_at)
        return links

    def _turn_until(self, is_done: Callable[[], bool], meeting: Meeting) -> None:
        """Take turns until `is_done`, once all ranks have met."""
        # NOT using a store that may end early: rank 0 may have formed the group and closed it.
        may_ask = self._store.outlives_join
        while not is_done():
            if may_ask:
                self._look_around_if_due(meeting)
            self._turn(self._look_around_at if may_ask else float("inf"))

    def _turn(self, wake_at: float) -> None:
        """Wait until `wake_at` for messages and handle them; TimedOut at the deadline."""
        now, deadline = time.monotonic(), self._store.deadline
        if now >= deadline:
            raise TimedOut("time is up")
        wake_at = min(wake_at, deadline, self._warn_if_due(""))
        if self._connections is not None:
            endpoint = self._connections.endpoint
            wait_for(endpoint, wake_at)
            endpoint.step(time.monotonic())

    # The store.

    def _look_around_if_due(self, meeting: Meeting) -> None:
        if time.monotonic() < self._look_around_at:
            return
        self._plan_to_look_around()
        meeting.look_around()
        before, waited_s = meeting.before, self._warnings.elapsed_s
        is_gone = before is not None and before.is_failure and waited_s >= self._options.gone_s
        if is_gone and not self._has_warned_of_gone:
            self._has_warned_of_gone = True
            verdict = f"waits for a rank, {waited_s:.3g} s so far"
            self._options.log.warning("%s", self._explain(verdict, ""))
        if self._connections is not None and self._connections.links is not None:
            self._connections.links.send_waiting()

    def _plan_to_look_around(self) -> None:
        """Schedule the next look, after twice the time; never for a single rank."""
        per_group_s = self._size * _PER_RANK_S if self._size > 1 else float("inf")
        self._look_around_at = time.monotonic() + self._look_s + per_group_s
        self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S)

    def _look_around_soon(self) -> None:
        """Look soon, but NOT at once: a stranger's HELLO must not cause a flood of requests."""
        self._look_s = _FIRST_LOOK_S
        self._look_around_at = min(self._look_around_at, time.monotonic() + _FIRST_LOOK_S)

    # Texts.

    def _warn_if_due(self, silence: str) -> float:
        return self._warnings.warn_if_due(
            lambda after_s: self._explain(f"has not joined after {after_s:g} s", silence)
        )

    def _explain(self, verdict: str, silence: str) -> str:
        if self._connections is not None:
            return self._connections.explain(verdict, silence)
        return f"rank {self._rank} of {self._size} on {self._options.label} {verdict}: {silence}"

    def _log(self, found: Membership) -> Membership:
        n_local = sum(peer.is_local for peer in found.peers)
        self._options.log.debug(
            "rank %d of %d joined epoch %016x in %.1f ms: %d peers on this host, %d on others",
            *(self._rank, found.size, found.epoch, 1e3 * self._warnings.elapsed_s),
            *(n_local, len(found.peers) - n_local),
        )
        return found


class Warnings:
    """Logs warnings of a long wait, the first one after `after_s`, at doubling intervals."""

    def __init__(self, after_s: float, log: logging.Logger) -> None:
        self._log = log
        self._started = time.monotonic()
        self._after_s = after_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def warn_if_due(self, explain: Callable[[float], str]) -> float:
        """Log `explain(seconds)` if a warning is due; return when the next one is."""
        after_s = self._after_s
        if self.elapsed_s >= after_s:
            self._after_s *= 2  # NOT later: `explain` may take until then
            self._log.warning("%s", explain(after_s))
        return self._started + self._after_s
