"""Turns a store into a group: proven sockets to every peer, and one epoch for all.

Every rank publishes a record, reads all others, and derives the epoch from all nonces: nobody
leads. Between hosts rank i connects to every lower rank and accepts from every higher one, over
TCP. Inside a host every rank connects to the lowest one, over an abstract Unix socket, and is
introduced to the others by it. A group on one host never listens on TCP; where there are several,
every rank does, and goes on for the life of the job: the native core then makes lost paths anew.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost, TimedOut, UsageError
from shoal.rendezvous.asking import Asking
from shoal.rendezvous.dialing import Dialing
from shoal.rendezvous.door import Door, is_out_of_descriptors, run_ready
from shoal.rendezvous.explain import explain
from shoal.rendezvous.farewell import LAST_WORDS_S, tell
from shoal.rendezvous.handshake import N_NONCE_BYTES, Hello, Progress
from shoal.rendezvous.introduce import HostMemory
from shoal.rendezvous.key import HOW_TO_SET_KEY, job_key, pair_key, random_key
from shoal.rendezvous.links import Links
from shoal.rendezvous.listener import listen_for_hosts, listen_unix, n_paths, port_range
from shoal.rendezvous.membership import Membership, PeerInfo
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.record import MAX_CARD_BYTES, Endpoint, Record, epoch_of, find_host_id
from shoal.rendezvous.roster import Roster

if TYPE_CHECKING:
    from shoal.rendezvous.link import Link
    from shoal.rendezvous.store import Store

_INTRODUCE_AGAIN_S: Final = 0.001  # when sockets took no more: nothing says when they do again
# When nothing moves, the records of all unlinked ranks are read again: some leftovers show in no
# other way. At first after the time that most joins take altogether, then less and less often.
_FIRST_REREAD_S: Final = 0.02
_LONGEST_REREAD_S: Final = 1.0
_REREAD_PER_RANK_S: Final = 0.002  # so that a large group does not flood its store
_QUICKEST_REREAD_S: Final = 0.005  # a stranger's HELLO must not make us flood the store


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
    """Meet all other ranks and return a proven, connected socket to each of them.

    Args:
        store: the same for all ranks; a group's own prefix of a shared one. Its calls are made on
            a thread of ours; one that does not return in time is left behind there (asking.py).
        timeout_s: for the whole of it.
        memory: what the ranks of this host share, made and entered while they meet.
        card: at most 255 bytes for all other ranks, see `Membership.cards`. It passes through the
            store, but once this returns it is proven to be what that rank gave.

    Raises (every socket is closed, the record stays in the store):
        UsageError: a variable is wrong, the keys differ, or the process has no descriptor left;
            here, or on a rank that has told us.
        TimedOut: names the ranks that are missing, why, and what to set; or the store, if it does
            not answer. May come half a second late if the store is slow to say what is missing.
        PeerLost: the store is gone; likewise. Or a rank has told us that it cannot join.

    A rank that fails tells those that have published by then (farewell.py), unless it is for the
    time: it may come again, and the others have deadlines of their own. While a join does not end,
    it warns of what it lacks, see `JoinOptions.warn_s`.

    Returns once every rank has every link, so a rank may close its group at once without harm to
    one that is still on its way out of here.

    Cost: two store requests that read all records, as a rule, and one that writes one (one more
    between hosts); three round trips to each peer on another host, and to the lowest of our own.
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


class _Join:
    """One rank's side of one rendezvous; the doorkeeper of its own door."""

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
        self._rank, self._size = rank, size
        self._memory = memory
        self._options = options
        self._selector = selector
        self._store = store
        given_key = job_key(options.environ)
        self._ports = port_range(options.environ)
        n_paths(options.environ)  # is right, or nothing begins
        host_id = find_host_id(options.environ)
        # From here on nothing may fail but `run`: nobody would close what is open.
        listener, unix_name = listen_unix()
        self._door = Door(selector, self, options.limits)
        self._door.open(listener)
        own = Record(
            size=size,
            nonce=os.urandom(N_NONCE_BYTES),
            host_id=host_id,
            host_label=options.label,
            unix_name=unix_name,
            has_own_key=given_key is not None,
            key=random_key() if rank == 0 and given_key is None else None,
            card=card,
        )
        self._roster = Roster(store, rank, own, given_key)
        self._trouble: dict[int, str] = {}  # what went wrong with a rank last
        # Links and dials are of the epoch that the roster shows.
        self._links = Links(rank, size, selector, self._lost, memory.enter)
        self._dialing = Dialing(
            selector,
            self._roster,
            options.dial_s,
            self._trouble,
            self._links.path_to_dial,
            self._add,
        )
        self._reread_at = float("inf")
        self._reread_s = _FIRST_REREAD_S
        self._read_last = 0.0
        self._has_tcp = False
        self._has_warned = False
        self._has_told_of_one_gone = False
        self._started = time.monotonic()
        self._warn_s = options.warn_s  # after our start, the next time
        store.alarm = self._warn_if_due

    @property
    def nonce(self) -> bytes:
        """What makes our record ours."""
        return self._roster.own.nonce

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank has told us that it cannot join."""
        return self._roster.has_lost_one

    def run(self, timeout_s: float) -> Membership:
        """Loop until every link is settled."""
        try:
            self._meet()
        except TimedOut as late:
            verdict = f"could not join within {timeout_s:.3g} s"
            raise TimedOut(self._explain(verdict, self._store.silence)) from late
        except PeerLost as lost:
            gone = self._roster.farewell
            if gone is None:
                verdict = f"had not joined after {time.monotonic() - self._started:.3g} s"
                lost.reason += f"; by then {self._explain(verdict, '')}"
            elif not self.has_lost_one:
                # It failed before we came, and without the store it cannot come again.
                raise gone.error() from lost
            raise
        membership = self._membership()
        n_local = sum(peer.is_local for peer in membership.peers)
        self._options.log.info(
            "rank %d of %d joined epoch %016x in %.1f ms: %d peers on this host, %d on others",
            self._rank,
            self._size,
            membership.epoch,
            1e3 * (time.monotonic() - self._started),
            n_local,
            len(membership.peers) - n_local,
        )
        return membership

    def _meet(self) -> None:
        deadline = self._store.deadline
        now = self._started
        if self._size > 1:
            self._roster.publish(self._roster.own)
        self._plan_reread(now)
        while not self._links.is_complete:
            if now >= deadline:
                self._store.deadline = now + LAST_WORDS_S
                raise TimedOut("time is up")
            self._turn(now, min(deadline, self._warn_if_due()))
            now = time.monotonic()
        self._links.say_ready()  # the last word may have come before ours was out

    def _turn(self, now: float, until: float) -> None:
        self._door.expire(now)
        self._dialing.expire(now)
        self._refresh_if_due(now)
        self._dialing.dial(self._links.to_dial(), now)
        self._links.introduce()
        self._links.say_ready()
        run_ready(self._selector, max(0.0, self._wake_at(until) - time.monotonic()))

    def _wake_at(self, until: float) -> float:
        times = [until, self._dialing.wake_at(self._links.to_dial())]
        if self._needs_store():
            times += [self._roster.read_at, self._reread_at]
        expiry = self._door.next_deadline()
        if expiry is not None:
            times.append(expiry)
        if self._links.is_introducing:
            times.append(time.monotonic() + _INTRODUCE_AGAIN_S)
        return min(times)

    def _lost(self, rank: int, error: OSError) -> None:
        self._dialing.fail(rank, error)
        self._reread_at = 0.0  # it may have told why it left

    def _warn_if_due(self) -> float:
        """Say what is lacking, at doubling intervals; returns when to say it again."""
        if time.monotonic() >= self._started + self._warn_s:
            verdict = f"has not joined after {self._warn_s:g} s"
            self._warn_s *= 2  # NOT later: to ask the store may take until then
            self._options.log.warning("%s", self._explain(verdict, self._store.silence))
        return self._started + self._warn_s

    def _warn_of_one_gone(self, now: float) -> None:
        """Say at an early time, once, that a rank has failed before we came."""
        is_time = now >= self._started + self._options.gone_s
        if self._roster.farewell is not None and is_time and not self._has_told_of_one_gone:
            self._has_told_of_one_gone = True
            verdict = f"waits for a rank, {now - self._started:.3g} s so far"
            self._options.log.warning("%s", self._explain(verdict, ""))

    def _explain(self, verdict: str, silence: str) -> str:
        return explain(self._roster, self._links, self._trouble, verdict, silence)

    def close(self) -> None:
        """Close everything that `run` has not handed out."""
        self._door.close()
        self._dialing.close()
        self._links.close()

    # The doorkeeper's part.

    def admit(self, hello: Hello) -> bytes | Progress:
        """The pair's key for a higher rank of our epoch."""
        if hello.to_rank != self._rank or not self._rank < hello.rank < self._size:
            return Progress.REFUSED
        if hello.epoch != self._roster.epoch:
            # Often it has simply seen the last record before we did. Or a rank has been started
            # again that we think we are linked to: who has said READY may die unseen.
            now = time.monotonic()
            is_due = now - self._read_last >= _QUICKEST_REREAD_S or self._roster.epoch is None
            if is_due and self._needs_store():
                self._roster.doubt(range(self._size))
                self._refresh(now)
        if hello.epoch != self._roster.epoch:
            return Progress.STALE
        return pair_key(self._roster.job_key, hello.epoch, self._rank, hello.rank)

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """A higher rank has proved itself. One that connects again has lost its first link."""
        is_local = sock.family == socket.AF_UNIX
        is_right_way = is_local is self._roster.is_local(hello.rank)
        is_expected = hello.epoch == self._roster.epoch and self._links.expects(hello.rank)
        if not is_right_way or not is_expected:
            sock.close()
            return
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._trouble.pop(hello.rank, None)
        if hello.path > 0:
            self._links.add_path(hello.rank, hello.path, sock)
            return
        self._links.drop(hello.rank)
        self._selector.register(sock, selectors.EVENT_READ)
        self._add(hello.rank, 0, sock)

    def _add(self, rank: int, path: int, sock: socket.socket) -> None:
        """Keep a proven socket, which the selector knows."""
        if path == 0:
            self._links.add(rank, sock, self._roster.n_connections(rank))
            return
        self._selector.unregister(sock)
        self._links.add_path(rank, path, sock)

    def key_differs(self, hello: Hello) -> None:
        """Remember it for the deadline, and look soon whether it has left: it is told at once."""
        self._trouble[hello.rank] = f"it holds another job key. {HOW_TO_SET_KEY}"
        self._reread_s = _FIRST_REREAD_S
        self._reread_at = min(self._reread_at, time.monotonic() + _FIRST_REREAD_S)

    # Records and epoch.

    def _refresh_if_due(self, now: float) -> None:
        if not self._needs_store():
            return
        if now >= self._reread_at:
            self._plan_reread(now)
            self._roster.check_own()
            self._roster.hear_farewell()
            self._warn_of_one_gone(now)
            if self._roster.epoch is not None:  # else nothing has been tried that could fail
                self._roster.doubt(set(range(self._size)) - self._links.met())
            self._links.say_whom_we_lack()
        if now >= self._roster.read_at:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        epoch = self._roster.epoch
        self._roster.refresh(now)
        self._read_last = now
        if self._roster.epoch != epoch:
            self._start_epoch()
            self._reread_s = _FIRST_REREAD_S
            self._plan_reread(now)

    def _needs_store(self) -> bool:
        """Not once every link stands: then rank 0 may have returned and ended its store."""
        return not self._links.is_open

    def _plan_reread(self, now: float) -> None:
        self._reread_at = now + self._reread_s + self._size * _REREAD_PER_RANK_S
        self._reread_s = min(2 * self._reread_s, _LONGEST_REREAD_S)

    def _start_epoch(self) -> None:
        """Begin anew: what was proved under another epoch was proved to a leftover."""
        self._dialing.start_anew()
        self._links.drop_all()
        host_ids = [self._roster.host_id(rank) for rank in range(self._size)]
        self._roster.n_channels = self._options.channels(host_ids, self._roster.cards())
        remote = self._roster.remote_ranks()
        host = sorted(set(range(self._size)) - set(remote))
        is_guide = host[0] == self._rank
        self._links.begin(host, remote, self._memory.make(len(host)) if is_guide else -1)
        if remote and not self._has_tcp:
            self._listen_for_hosts()
        own = self._roster.own
        if remote and own.key is not None and not self._has_warned:
            self._has_warned = True
            self._options.log.warning(
                "this job spans hosts without a job key, so whoever reaches its store can join it: "
                "set SHOAL_KEY_FILE to a file of mode 0600 with the same key on every host"
            )

    def _listen_for_hosts(self) -> None:
        environ = self._options.environ
        master = self._options.master_addr or environ.get("MASTER_ADDR") or self._store.host
        listeners, paths = listen_for_hosts(self._rank, master, self._ports, environ)
        for listener in listeners:
            self._door.open(listener)
        self._has_tcp = True
        self._links.ports = {one.address: one.port for one in paths}
        own = self._roster.own._replace(endpoint=paths[0], more=tuple(paths[1:]))
        self._roster.publish(own)

    # The end of it.

    def _membership(self) -> Membership:
        epoch = self._roster.epoch
        if epoch is None:  # alone: nobody was waited for, nothing was read
            epoch = epoch_of([self._roster.own.nonce])
        peers = []
        for link in self._links.take():
            if link.is_local:
                link.close()  # it has served: host-mates meet in the memory they share
                continue
            where = self._where(link.rank, link.address)
            listens_at, more = self._listens_at(link), link.detach_more()
            peers.append(PeerInfo(*where, False, (link.detach(), *more), listens_at))
        others = set(self._links.host) - {self._rank}
        peers += [PeerInfo(*self._where(rank, "unix"), True) for rank in others]
        peers.sort(key=lambda peer: peer.rank)
        own = self._roster.own
        key = self._roster.job_key
        cards = self._roster.cards()
        ids = self._roster.process_ids()
        listeners = tuple(listener.detach() for listener in self._door.hand_over())
        whole = (epoch, self._rank, self._size, own.host_id, tuple(peers), cards, key, ids)
        return Membership(*whole, listeners)

    def _where(self, rank: int, address: str) -> tuple[int, str, str, str]:
        return rank, self._roster.label(rank), self._roster.host_id(rank), address

    def _listens_at(self, link: Link) -> tuple[tuple[str, int], ...]:
        """See `PeerInfo.listens_at`."""
        targets: list[Endpoint | str | None] = [link.listens_at]
        if link.rank < self._rank:
            targets = [self._roster.target(link.rank, path) for path in range(link.n_paths)]
        return tuple((one.address, one.port) for one in targets if isinstance(one, Endpoint))
