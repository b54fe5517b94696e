"""Turns a store into a group: one epoch for all, and what every rank must know of every other.

Every rank publishes a record; rank 0 reads all of them and writes the roll, which names the epoch
(meeting.py). Then each rank connects to one other: inside a host to the lowest, over an abstract
Unix socket; the lowest ranks of the hosts over TCP, along a binary tree. Words go up this tree,
each for a rank and all below it, and come down again as one roster (links.py). A group on one host
never listens on TCP; where there are several, every rank does, and goes on for the life of the job:
the native core makes connections there when they are first needed.

    GATHERING   no roll with us on it: some rank has not come
    LINKING     there is one; a link is lacking, or the word of a rank below
    AWAITING    our word is given; that of the rank above is lacking
    PASSING     we know all; our word to ranks below is on its way
    FORMED

A link that breaks leads from AWAITING back to LINKING, another roll from anywhere before PASSING.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import InternalError, PeerLost, TimedOut, UsageError
from shoal.rendezvous.dialing import MEETING_PATH, Dialing, Way
from shoal.rendezvous.door import Door, is_out_of_descriptors, run_ready
from shoal.rendezvous.explain import explain
from shoal.rendezvous.farewell import LAST_WORDS_S, tell
from shoal.rendezvous.handshake import N_NONCE_BYTES, Hello, Progress
from shoal.rendezvous.introduce import HostMemory
from shoal.rendezvous.key import HOW_TO_SET_KEY, job_key, pair_key
from shoal.rendezvous.links import Links
from shoal.rendezvous.listener import listen_for_hosts, listen_unix, n_paths, port_range
from shoal.rendezvous.meeting import Guest, Host
from shoal.rendezvous.membership import Membership
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.patience import Rereading, Warnings
from shoal.rendezvous.record import Endpoint, Record, find_host_id
from shoal.rendezvous.roster import MAX_CARD_BYTES, Entry
from shoal.rendezvous.store.asking import Asking
from shoal.rendezvous.tree import Tree

if TYPE_CHECKING:
    from shoal.rendezvous.meeting import Meeting
    from shoal.rendezvous.roll import Roll
    from shoal.rendezvous.store import Store

_INTRODUCE_AGAIN_S: Final = 0.001  # when sockets took no more: nothing says when they do again
# For which we do not look at our door, while the store shows nobody new.
_LONGEST_WAIT_S: Final = 0.2


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    memory: HostMemory = HostMemory(),  # noqa: B008 - it is constant
    card: bytes = b"",
    options: JoinOptions | None = None,
) -> Membership:
    """Meet all other ranks and return who they are and where they can be reached.

    Args:
        store: the same for all ranks; a group's own prefix of a shared one. Its calls are made on
            a thread of ours; one that does not return in time stays behind (store/asking.py).
        timeout_s: for the whole of it.
        memory: what the ranks of this host share, made and entered while they meet.
        card: at most 255 bytes for all other ranks, see `Membership.cards`. It never lies in the
            store, but travels over connections that are proven.

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
    if len(card) > MAX_CARD_BYTES:
        raise UsageError(f"a card of {len(card)} bytes; expected at most {MAX_CARD_BYTES}")
    chosen = options or JoinOptions()
    asked = Asking(store, time.monotonic() + timeout_s)
    attempt: _Join | None = None
    with contextlib.ExitStack() as on_exit:
        on_exit.callback(asked.close)
        try:
            selector = on_exit.enter_context(selectors.DefaultSelector())
            attempt = _Join(asked, rank, size, memory, card, chosen, selector)
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
    return error


class _State(enum.Enum):
    """How far one rank's join has come, see above."""

    GATHERING = enum.auto()
    LINKING = enum.auto()
    AWAITING = enum.auto()
    PASSING = enum.auto()
    FORMED = enum.auto()


class _Join:
    """One rank's side of one meeting; the doorkeeper of its own door."""

    def __init__(
        self,
        store: Asking,
        rank: int,
        size: int,
        memory: HostMemory,
        card: bytes,
        options: JoinOptions,
        selector: selectors.BaseSelector,
    ) -> None:
        self._state = _State.GATHERING
        self._rank, self._size = rank, size
        self._memory, self._card, self._options = memory, card, options
        self._selector, self._store = selector, store
        given_key = job_key(options.environ)
        self._ports = port_range(options.environ)
        n_paths(options.environ)  # is right, or nothing begins
        host_id = find_host_id(options.environ)
        # From here on nothing may fail but `run`: nobody would close what is open.
        listener, unix_name = listen_unix()
        self._door = Door(selector, self, options.limits)
        self._door.open(listener)
        nonce, label = os.urandom(N_NONCE_BYTES), options.label
        own = Record(size, nonce, host_id, label, unix_name, given_key is not None)
        self._meeting: Meeting = (
            Guest(store, own, rank, given_key) if rank else Host(store, own, given_key)
        )
        self._trouble: dict[int, str] = {}  # what went wrong with a rank last
        self._links: Links | None = None  # of the roll
        self._roster: dict[int, Entry] = {}  # of all ranks, once we know them
        self._dialing = Dialing(selector, options.dial_s, self._reached, self._not_reached)
        self._listens_at: tuple[Endpoint, ...] = ()
        self._reread = Rereading(size)
        self._warnings = Warnings(options, self._explain)
        store.alarm = lambda: self._warnings.say_if_due(store.silence)

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
        try:
            self._meet()
        except TimedOut as late:
            verdict = f"could not join within {timeout_s:.3g} s"
            raise TimedOut(self._explain(verdict, self._store.silence)) from late
        except PeerLost as lost:
            gone = self._meeting.farewell
            if gone is None:
                verdict = f"had not joined after {self._warnings.elapsed_s:.3g} s"
                lost.reason += f"; by then {self._explain(verdict, '')}"
            elif not self.has_lost_one:
                # It failed before we came, and without the store it cannot come again.
                raise gone.error() from lost
            raise
        return self._membership()

    def close(self) -> None:
        """Close everything that `run` has not handed out."""
        self._door.close()
        self._dialing.close()
        if self._links is not None:
            self._links.close()

    # The states.

    def _meet(self) -> None:
        if self._size > 1:
            self._meeting.publish(self._meeting.own)
        self._reread.plan(time.monotonic())
        while self._state is not _State.FORMED:
            now, deadline = time.monotonic(), self._store.deadline
            if now >= deadline:
                self._store.deadline = now + LAST_WORDS_S
                raise TimedOut("time is up")
            until = min(deadline, self._warnings.say_if_due(""))
            self._door.expire(now)
            wake_at = min(until, self._step(now, until), self._door.next_deadline() or until)
            run_ready(self._selector, max(0.0, wake_at - time.monotonic()))

    def _step(self, now: float, until: float) -> float:
        """What this state has to do; returns when it has again, unless a socket is ready before."""
        if self._state is _State.GATHERING:
            return self._gather(now, until)
        if self._state is _State.LINKING:
            return self._link(now)
        if self._state is _State.AWAITING:
            return self._await_word()
        return self._pass_on()

    def _gather(self, now: float, until: float) -> float:
        self._look_around_if_due(now)
        if now >= self._meeting.look_at:
            # NOT waiting in the store while somebody waits at the door.
            is_alone = self._door.next_deadline() is None
            self._look(min(until, self._reread.at, now + _LONGEST_WAIT_S) if is_alone else now)
        return min(self._meeting.look_at, self._reread.at)

    def _link(self, now: float) -> float:
        self._look_around_if_due(now)
        if now >= self._meeting.look_at:
            self._look(now)
        links = self._links
        if links is None or self._state is not _State.LINKING:
            return now
        wake_at = self._dialing.step(now) if links.lacks_above else float("inf")
        links.introduce()
        if links.is_ready:
            self._give_word(links)
            return now
        again_at = now + _INTRODUCE_AGAIN_S if links.is_introducing else float("inf")
        return min(wake_at, again_at, self._meeting.look_at, self._reread.at)

    def _give_word(self, links: Links) -> None:
        # NOT to those who come now: they may have formed the group already, and mean the native
        # core, which takes over the listeners.
        self._door.shut()
        self._state = _State.AWAITING if self._rank else _State.PASSING
        links.give_word(self._entry())
        if self._state is _State.PASSING:
            self._roster = links.pass_on(self._entry())

    def _await_word(self) -> float:
        """NOT asking the store: rank 0 may have formed the group by now, and ended it."""
        links = self._links
        if links is not None and links.roster is not None:
            self._state = _State.PASSING
            self._roster = links.pass_on(self._entry())
            return self._pass_on()
        return float("inf")

    def _pass_on(self) -> float:
        if self._links is None or not self._links.is_passed_on:
            return float("inf")
        self._state = _State.FORMED
        return 0.0

    def _lost(self, rank: int, error: OSError) -> None:
        """A link broke: of the words given, those that stood for it do not count any more."""
        if self._roster or self._links is None:
            return  # it is lost to the group that has formed, or it has left that again
        self._trouble[rank] = (error.strerror or str(error)).lower()
        if rank == self._links.tree.parent:
            self._dialing.fail(error)
        elif self._state is _State.AWAITING and self._links.tree.parent is not None:
            self._links.drop(self._links.tree.parent)
        self._state = _State.LINKING
        self._door.reopen()
        self._reread.at = 0.0  # it may have told why it left

    # The roll.

    def _look_around_if_due(self, now: float) -> None:
        if now < self._reread.at:
            return
        self._reread.plan(now)
        self._meeting.look_around()
        if self._meeting.farewell is not None:
            self._warnings.say_that_one_is_gone(now)
        self._meeting.doubt()
        if self._links is not None:
            self._links.say_who_keeps_us_waiting()

    def _look(self, until: float) -> None:
        roll = self._meeting.roll
        self._meeting.look(until)
        if self._meeting.roll is not None and self._meeting.roll != roll:
            self._begin(self._meeting.roll)

    def _begin(self, roll: Roll) -> None:
        """Begin anew: what was proved under another epoch was proved to a leftover."""
        if self._links is not None:
            self._links.drop_all()
        tree = Tree(roll.hosts, self._rank)
        makes = tree.is_guide and self._size > 1
        memory_fd = self._memory.make(len(tree.host)) if makes else -1
        epoch, key = roll.epoch, self._meeting.job_key

        def secret(rank: int, role: str) -> bytes:
            return pair_key(key, epoch, self._rank, rank, role)

        ends = self._lost, self._memory.enter
        self._links = Links(self._selector, tree, self._rank, secret, memory_fd, *ends)
        if tree.n_hosts > 1:
            self._listen_for_hosts(tree)
        self._dialing.start_anew(self._way(tree, roll))
        self._reread.start_anew(time.monotonic())
        self._state = _State.LINKING
        self._door.reopen()

    def _way(self, tree: Tree, roll: Roll) -> Way | None:
        """To the rank above."""
        above = tree.parent
        if above is None:
            return None

        def target() -> Endpoint | str | None:
            return roll.doors[roll.hosts[above]] if is_local else self._meeting.endpoint(above)

        is_local = tree.is_local(above)
        hello = Hello(roll.epoch, self._rank, above, MEETING_PATH)
        key = pair_key(self._meeting.job_key, roll.epoch, self._rank, above)
        return Way(hello, key, target, lambda: f"rank {above} on {self._meeting.label(above)}")

    def _listen_for_hosts(self, tree: Tree) -> None:
        if not self._listens_at:
            environ = self._options.environ
            master = self._options.master_addr or environ.get("MASTER_ADDR") or self._store.host
            listeners, paths = listen_for_hosts(self._rank, master, self._ports, environ)
            for listener in listeners:
                self._door.open(listener)
            self._listens_at = tuple(paths)
            if self._rank == 0 and not job_key(environ):
                self._options.log.warning(
                    "this job spans hosts without a job key, so whoever reaches its store can join "
                    "it: set SHOAL_KEY_FILE to a file of mode 0600 with the same key on every host"
                )
        own = self._meeting.own
        if tree.has_hosts_below and own.endpoint is None:
            self._meeting.publish(own._replace(endpoint=self._listens_at[0]))

    # Links: to the rank above, and the doorkeeper's part.

    def _reached(self, sock: socket.socket) -> None:
        if self._links is not None and self._links.tree.parent is not None:
            self._links.add(self._links.tree.parent, sock)

    def _not_reached(self, why: OSError | Progress, retry_at: float) -> None:
        above = None if self._links is None else self._links.tree.parent
        if above is None:
            return
        if why is Progress.STALE:
            self._trouble[above] = "it is in another epoch, perhaps still in an earlier group"
        elif isinstance(why, Progress):
            self._trouble[above] = "what answered there did not prove to be that rank"
        else:
            self._trouble[above] = (why.strerror or str(why)).lower()
        self._meeting.doubt(retry_at)  # right before it is used again, not now

    def admit(self, hello: Hello) -> bytes | Progress:
        """The pair's key for a rank that is below ours in our epoch."""
        is_ours = hello.to_rank == self._rank < hello.rank < self._size
        if not is_ours or hello.path != MEETING_PATH or self._state is _State.PASSING:
            return Progress.REFUSED
        if not self._is_of_our_epoch(hello):
            # Often it has simply seen the roll before we did.
            now = time.monotonic()
            if self._state is _State.LINKING and self._reread.may_be_now(now):
                self._look(now)
        roll = self._meeting.roll
        if roll is None or self._links is None or not self._is_of_our_epoch(hello):
            return Progress.STALE
        if not self._links.is_below(hello.rank):
            return Progress.REFUSED
        return pair_key(self._meeting.job_key, hello.epoch, self._rank, hello.rank)

    def _is_of_our_epoch(self, hello: Hello) -> bool:
        return self._meeting.roll is not None and hello.epoch == self._meeting.roll.epoch

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """A rank below has proved itself. One that connects again has lost its first link."""
        links = self._links
        is_expected = self._is_of_our_epoch(hello) and self._state is not _State.PASSING
        if links is None or not is_expected or not links.is_below(hello.rank):
            sock.close()
            return
        is_local = sock.family == socket.AF_UNIX
        if is_local is not links.tree.is_local(hello.rank):
            sock.close()
            return
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._state is _State.AWAITING:
            self._lost(hello.rank, ConnectionResetError("it connected again"))
        self._trouble.pop(hello.rank, None)
        self._selector.register(sock, selectors.EVENT_READ)
        links.add(hello.rank, sock)

    def key_differs(self, hello: Hello) -> None:
        """Remember it for the deadline, and look soon whether it has left: it is told at once."""
        self._trouble[hello.rank] = f"it holds another job key. {HOW_TO_SET_KEY}"
        self._reread.soon(time.monotonic())

    # What is said in the end.

    def _explain(self, verdict: str, silence: str) -> str:
        known = self._meeting, self._links, self._trouble, self._dialing.at
        return explain(*known, verdict, silence)

    def _entry(self) -> Entry:
        """What all others are told of us."""
        own = self._meeting.own
        return Entry(own.host_id, own.host_label, self._card, self._listens_at)

    def _membership(self) -> Membership:
        listeners = tuple(listener.detach() for listener in self._door.hand_over())
        roll = self._meeting.roll
        if roll is None:
            raise InternalError("a group has formed without a roll")
        found = Membership(roll, self._roster, self._rank, self._meeting.job_key, listeners)
        n_local = sum(peer.is_local for peer in found.peers)
        self._options.log.info(
            "rank %d of %d joined epoch %016x in %.1f ms: %d peers on this host, %d on others",
            *(self._rank, self._size, found.epoch, 1e3 * self._warnings.elapsed_s),
            *(n_local, len(found.peers) - n_local),
        )
        return found
