"""Turns a store into a group: proven sockets to every peer, and one epoch for all.

Every rank publishes a record, reads all others, and derives the epoch from all nonces: nobody
leads. Between hosts rank i connects to every lower rank and accepts from every higher one, over
TCP. Inside a host every rank connects to the lowest one, over an abstract Unix socket, and is
introduced to the others by it. A group on one host never listens on TCP.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost, TimedOut, UsageError
from shoal.rendezvous.door import Door, Limits, is_out_of_descriptors, run_ready
from shoal.rendezvous.explain import explain
from shoal.rendezvous.handshake import N_NONCE_BYTES, ClientHandshake, Hello, Progress
from shoal.rendezvous.interface import choose_address
from shoal.rendezvous.introduce import Introduction
from shoal.rendezvous.key import HOW_TO_SET_KEY, job_key, pair_key, random_key
from shoal.rendezvous.link import MAX_FDS, Dial, Link
from shoal.rendezvous.listener import listen_tcp, listen_unix, port_range
from shoal.rendezvous.membership import Membership, PeerInfo
from shoal.rendezvous.record import MAX_CARD_BYTES, Endpoint, Record, epoch_of, find_host_id
from shoal.rendezvous.roster import Roster

if TYPE_CHECKING:
    from shoal.rendezvous.store import Store

_FIRST_RETRY_S: Final = 0.001
_LONGEST_RETRY_S: Final = 0.2
# When nothing moves, the records of all unlinked ranks are read again: some leftovers show in no
# other way. At first after the time that most joins take altogether, then less and less often.
_FIRST_REREAD_S: Final = 0.02
_LONGEST_REREAD_S: Final = 1.0
_REREAD_PER_RANK_S: Final = 0.002  # so that a large group does not flood its store
_QUICKEST_REREAD_S: Final = 0.005  # a stranger's HELLO must not make us flood the store


@dataclass(frozen=True)
class JoinOptions:
    """What a join rarely needs to be told.

    Args:
        host_label: this host's name in messages; None takes the host name.
        master_addr: decides the interface; None takes `MASTER_ADDR`, else the store's host.
        environ: read instead of `os.environ` for every `SHOAL_` variable and `MASTER_ADDR`.
        limits: what strangers may cost.
        dial_s: seconds for one connection attempt, until the next one.
        log: takes the one warning and a line of information per join.
    """

    host_label: str | None = None
    master_addr: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    limits: Limits = field(default_factory=Limits)
    dial_s: float = 5.0
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("shoal"))


LocalFds = Callable[[int], Sequence[int]]


def _no_fds(n_local: int) -> Sequence[int]:
    return ()


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    local_fds: LocalFds = _no_fds,
    card: bytes = b"",
    options: JoinOptions | None = None,
) -> Membership:
    """Meet all other ranks and return a proven, connected socket to each of them.

    Args:
        store: the same for all ranks; a group's own prefix of a shared one. Its calls may block
            for as long as its own timeout says.
        timeout_s: for the whole of it.
        local_fds: called with the number of ranks on this host, this one included, once that is
            known (again if the ranks change); gives at most 16 descriptors to pass to every peer
            on this host, borrowed.
        card: at most 255 bytes for all other ranks, see `Membership.cards`. It passes through the
            store, but once this returns it is proven to be what that rank gave.

    Raises (every socket is closed, the record stays in the store):
        UsageError: a variable is wrong, the keys differ, or the process has no descriptor left.
        TimedOut: names the ranks that are missing, why, and what to set.
        PeerLost: the store is gone; likewise.

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
    deadline = time.monotonic() + timeout_s
    try:
        with selectors.DefaultSelector() as selector:
            chosen = options or JoinOptions()
            attempt = _Join(store, rank, size, local_fds, card, chosen, selector)
            try:
                return attempt.run(deadline, timeout_s)
            finally:
                attempt.close()
    except OSError as error:
        if is_out_of_descriptors(error):
            raise UsageError(
                f"rank {rank} has no file descriptor left to join a group of {size}: raise "
                "`ulimit -n`"
            ) from error
        raise


class _Join:
    """One rank's side of one rendezvous; the doorkeeper of its own door."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        local_fds: LocalFds,
        card: bytes,
        options: JoinOptions,
        selector: selectors.BaseSelector,
    ) -> None:
        self._rank, self._size = rank, size
        self._make_fds = local_fds
        self._local_fds: tuple[int, ...] = ()
        self._options = options
        self._selector = selector
        self._store = store
        given_key = job_key(options.environ)
        self._ports = port_range(options.environ)
        host_id = find_host_id(options.environ)
        # From here on nothing may fail but `run`: nobody would close what is open.
        listener, unix_name = listen_unix()
        self._door = Door(selector, self, options.limits)
        self._door.open(listener)
        own = Record(
            size=size,
            nonce=os.urandom(N_NONCE_BYTES),
            host_id=host_id,
            host_label=(options.host_label or socket.gethostname())[:255],
            unix_name=unix_name,
            has_own_key=given_key is not None,
            key=random_key() if rank == 0 and given_key is None else None,
            card=card,
        )
        self._roster = Roster(store, rank, own, given_key)
        self._epoch: int | None = None  # of the links and dials below
        self._locals = [rank]  # of our host; the first introduces the others
        # With whom we prove ourselves to each other, rather than being introduced.
        self._direct = [other for other in range(size) if other != rank]
        self._links: dict[int, Link] = {}
        self._introduction: Introduction | None = None  # ours, of the others
        self._lacked: int | None = None  # by the rank that introduces us, before we lost it
        self._dials: dict[int, Dial] = {}
        self._dial_until: dict[int, float] = {}
        self._dial_at: dict[int, float] = {}
        self._retry_s: dict[int, float] = {}
        self._trouble: dict[int, str] = {}  # what went wrong with a rank last
        self._reread_at = float("inf")
        self._reread_s = _FIRST_REREAD_S
        self._read_last = 0.0
        self._has_tcp = False
        self._has_warned = False

    def run(self, deadline: float, timeout_s: float) -> Membership:
        """Loop until every link is settled."""
        started = now = time.monotonic()
        if self._size > 1:
            self._roster.publish(self._roster.own)
        while not self._is_complete():
            if now >= deadline:
                raise TimedOut(self._explain(timeout_s))
            try:
                self._turn(now, deadline)
            except PeerLost as lost:
                lost.reason += f"; by then {self._explain(time.monotonic() - started)}"
                raise
            now = time.monotonic()
        self._say_ready()  # the last word may have come before ours was out
        membership = self._membership()
        n_local = sum(peer.is_local for peer in membership.peers)
        self._options.log.info(
            "rank %d of %d joined epoch %016x in %.1f ms: %d peers on this host, %d on others",
            self._rank,
            self._size,
            membership.epoch,
            1e3 * (now - started),
            n_local,
            len(membership.peers) - n_local,
        )
        return membership

    def _turn(self, now: float, deadline: float) -> None:
        self._door.expire(now)
        self._expire_dials(now)
        self._refresh_if_due(now)
        self._dial_missing(now)
        self._introduce()
        self._say_ready()
        run_ready(self._selector, max(0.0, self._wake_at(deadline) - time.monotonic()))

    def _explain(self, after_s: float) -> str:
        met, trouble = self._met(), dict(self._trouble)
        guide = self._locals[0]
        lacked = self._links[guide].waits_for if guide in self._links else self._lacked
        if lacked is not None and lacked not in met:
            # The guide lacks that rank to introduce us to the others, so they are not to blame.
            met |= set(self._locals[1:]) - {lacked}
            why = f"it never connected to rank {guide}, which introduces the ranks of this host"
            trouble.setdefault(lacked, why)
        return explain(self._roster, met, trouble, after_s)

    def close(self) -> None:
        """Close everything that `run` has not handed out."""
        self._door.close()
        self._end_introduction()
        for dial in self._dials.values():
            dial.close()
        for link in self._links.values():
            link.close()

    # The doorkeeper's part.

    def admit(self, hello: Hello) -> bytes | Progress:
        """The pair's key for a higher rank of our epoch."""
        if hello.to_rank != self._rank or not self._rank < hello.rank < self._size:
            return Progress.REFUSED
        if hello.epoch != self._epoch:
            # Often it has simply seen the last record before we did. Or a rank has been started
            # again that we think we are linked to: who has said READY may die unseen.
            now = time.monotonic()
            is_due = now - self._read_last >= _QUICKEST_REREAD_S or self._epoch is None
            if is_due and self._needs_store():
                self._roster.doubt(range(self._size))
                self._refresh(now)
        if self._epoch is None or hello.epoch != self._epoch:
            return Progress.STALE
        return pair_key(self._roster.job_key, hello.epoch, self._rank, hello.rank)

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """A higher rank has proved itself. One that connects again has lost its first link."""
        is_local = sock.family == socket.AF_UNIX
        is_ours = self._roster.is_local(hello.rank)
        if hello.epoch != self._epoch or is_local is not is_ours or hello.rank not in self._direct:
            sock.close()
            return
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._drop_link(hello.rank)
        self._selector.register(sock, selectors.EVENT_READ)
        self._link(hello.rank, sock)

    def key_differs(self, hello: Hello) -> None:
        """Remember it for the deadline; the other side is told at once."""
        self._trouble[hello.rank] = f"it holds another job key. {HOW_TO_SET_KEY}"

    # Records and epoch.

    def _refresh_if_due(self, now: float) -> None:
        if not self._needs_store():
            return
        if now >= self._reread_at:
            self._plan_reread(now)
            self._roster.check_own()
            self._roster.doubt(self._unlinked())
            self._say_whom_we_lack()
        if now >= self._roster.read_at:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        self._roster.refresh(now)
        self._read_last = now
        if self._roster.epoch is not None and self._roster.epoch != self._epoch:
            self._start_epoch(self._roster.epoch)
            self._reread_s = _FIRST_REREAD_S
            self._plan_reread(now)

    def _needs_store(self) -> bool:
        """Not once every link stands: then rank 0 may have returned and ended its store."""
        return not self._is_open()

    def _plan_reread(self, now: float) -> None:
        self._reread_at = now + self._reread_s + self._size * _REREAD_PER_RANK_S
        self._reread_s = min(2 * self._reread_s, _LONGEST_REREAD_S)

    def _start_epoch(self, epoch: int) -> None:
        """Begin anew: what was proved under another epoch was proved to a leftover."""
        for rank in list(self._dials):
            self._drop_dial(rank)
        for rank in list(self._links):
            self._drop_link(rank)
        self._dial_at.clear()
        self._retry_s.clear()
        self._epoch = epoch
        remote = self._roster.remote_ranks()
        self._locals = sorted(set(range(self._size)) - set(remote))
        guide = self._locals[0]
        self._direct = sorted(remote + (self._locals[1:] if guide == self._rank else [guide]))
        self._local_fds = tuple(self._make_fds(self._size - len(remote)))
        if len(self._local_fds) > MAX_FDS:
            raise UsageError(f"{len(self._local_fds)} local_fds; expected at most {MAX_FDS}")
        if remote and remote[-1] > self._rank and not self._has_tcp:
            self._listen_tcp()
        own = self._roster.own
        if remote and own.key is not None and not self._has_warned:
            self._has_warned = True
            self._options.log.warning(
                "this job spans hosts without a job key, so whoever reaches its store can join it: "
                "set SHOAL_KEY_FILE to a file of mode 0600 with the same key on every host"
            )

    def _listen_tcp(self) -> None:
        options = self._options
        master = options.master_addr or options.environ.get("MASTER_ADDR")
        chosen = choose_address(master or self._store.host, options.environ)
        try:
            listener = listen_tcp(chosen.address, self._ports)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            ports = options.environ.get("SHOAL_PORT_RANGE", "any port")
            raise UsageError(
                f"rank {self._rank} cannot listen on {chosen.address} ({chosen.interface}, from "
                f"{chosen.why}), {ports}: {error.strerror}. Widen SHOAL_PORT_RANGE, or set "
                "SHOAL_SOCKET_IFNAME to another interface"
            ) from error
        self._door.open(listener)
        self._has_tcp = True
        endpoint = Endpoint(chosen.address, listener.getsockname()[1], chosen.interface)
        self._roster.publish(self._roster.own._replace(endpoint=endpoint))

    # Connecting.

    def _dial_missing(self, now: float) -> None:
        for rank in self._direct:
            if rank > self._rank or rank in self._links or rank in self._dials:
                continue
            if now < self._dial_at.get(rank, 0.0):
                continue
            target = self._roster.target(rank)
            if target is not None:
                self._dial(rank, target, now)

    def _dial(self, rank: int, target: Endpoint | str, now: float) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        key = pair_key(self._roster.job_key, epoch, self._rank, rank)
        handshake = ClientHandshake(Hello(epoch, self._rank, rank), key)
        try:
            dial = Dial(rank, target, handshake)
        except OSError as error:
            self._fail(rank, error)
            return
        self._dials[rank] = dial
        self._dial_until[rank] = now + self._options.dial_s
        on_ready = functools.partial(self._on_dial, dial)
        self._selector.register(dial.sock, selectors.EVENT_WRITE, on_ready)
        try:
            dial.start()
        except OSError as error:
            self._fail(rank, error)

    def _on_dial(self, dial: Dial) -> None:
        if self._dials.get(dial.rank) is not dial:
            return  # dropped earlier in this wake-up
        was_connected = dial.is_connected
        try:
            progress = dial.step()
        except OSError as error:
            self._fail(dial.rank, error)
            return
        if progress is Progress.DONE:
            del self._dials[dial.rank]
            self._link(dial.rank, dial.sock)
        elif progress is Progress.WAITING:
            if not was_connected:
                on_ready = functools.partial(self._on_dial, dial)
                self._selector.modify(dial.sock, selectors.EVENT_READ, on_ready)
        elif progress is Progress.KEY_DIFFERS:
            raise UsageError(
                f"rank {self._rank} may not join: rank {dial.rank} on {self._label(dial.rank)} "
                f"holds another job key. {HOW_TO_SET_KEY}"
            )
        else:
            self._fail(dial.rank, progress)

    def _fail(self, rank: int, why: OSError | Progress) -> None:
        """Give up this attempt, doubt the record it came from, and try again a little later."""
        self._drop_dial(rank)
        wait_s = self._retry_s.get(rank, _FIRST_RETRY_S)
        self._retry_s[rank] = min(2 * wait_s, _LONGEST_RETRY_S)
        self._dial_at[rank] = retry_at = time.monotonic() + wait_s
        # The records are read again right before they are used again, not now.
        if why is Progress.STALE:
            self._trouble[rank] = "it is in another epoch, perhaps still in an earlier group"
            self._roster.doubt(range(self._size), retry_at)
        elif isinstance(why, Progress):
            self._trouble[rank] = "what answered there did not prove to be that rank"
            self._roster.doubt((rank,), retry_at)
        else:
            self._trouble[rank] = (why.strerror or str(why)).lower()
            self._roster.doubt((rank,), retry_at)

    def _expire_dials(self, now: float) -> None:
        for rank in [rank for rank in self._dials if now >= self._dial_until[rank]]:
            self._fail(rank, OSError(f"no answer within {self._options.dial_s:g} s"))

    # Links.

    def _link(self, rank: int, sock: socket.socket) -> None:
        """Keep a proven socket, which is registered already."""
        guides = rank == self._locals[0]
        link = Link(rank, sock, len(self._locals) - 1 if guides else 0)
        self._links[rank] = link
        on_ready = functools.partial(self._on_link, link)
        self._selector.modify(sock, selectors.EVENT_READ, on_ready)
        try:
            if guides:
                link.offer(self._local_fds)
        except OSError as error:
            self._lose(link, error)

    def _on_link(self, link: Link) -> None:
        if self._links.get(link.rank) is not link:
            return  # dropped earlier in this wake-up
        try:
            link.step()
        except OSError as error:
            self._lose(link, error)
            return
        if link.is_settled:
            self._selector.unregister(link.sock)

    def _lose(self, link: Link, error: OSError) -> None:
        self._drop_link(link.rank)
        self._fail(link.rank, error)

    def _drop_link(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            if not link.is_settled:
                self._selector.unregister(link.sock)
            link.close()
            if link.is_local:
                self._lacked = link.waits_for
                self._end_introduction()

    def _drop_dial(self, rank: int) -> None:
        dial = self._dials.pop(rank, None)
        if dial is not None:
            self._selector.unregister(dial.sock)
            dial.close()

    def _unlinked(self) -> list[int]:
        return sorted(set(range(self._size)) - self._met())

    def _met(self) -> set[int]:
        """The ranks that we are linked to, or were introduced to."""
        return set(self._links).union(*(link.introduced for link in self._links.values()))

    # Introducing the other ranks of this host, if we are its lowest.

    def _members(self) -> list[Link]:
        if self._locals[0] != self._rank:
            return []
        return [self._links[rank] for rank in self._locals[1:] if rank in self._links]

    def _introduce(self) -> None:
        """Begin once all are here; then go on as far as the sockets take it."""
        members = self._members()
        if self._introduction is None:
            is_time = members and len(members) == len(self._locals) - 1
            if not is_time or not all(link.is_open for link in members):
                return
            self._introduction = Introduction(self._rank, self._local_fds, members)
        broken = self._introduction.step()
        if broken is not None:
            self._lose(broken, ConnectionResetError(errno.ECONNRESET, "it closed the connection"))

    def _end_introduction(self) -> None:
        """One who took part is gone: the others connect anew, so that all begin together."""
        introduction, self._introduction = self._introduction, None
        if introduction is not None:
            introduction.close()
            for link in self._members():
                self._drop_link(link.rank)

    def _say_whom_we_lack(self) -> None:
        members = self._members()
        lacking = set(self._locals[1:]) - {link.rank for link in members}
        for link in members if lacking else ():
            with contextlib.suppress(OSError):  # it serves the text of an error, nothing else
                link.say_waiting(min(lacking))

    # The end of it.

    def _say_ready(self) -> None:
        """Once all our links are open, tell every peer.

        So no rank returns, and perhaps closes its group again, while another still needs it: the
        first to return has heard from all ranks that they lack nothing but such words.
        """
        if self._is_open():
            members = self._members()
            # For its members the guide's word stands for all of the host.
            are_ready = all(link.is_settled for link in members)
            for link in list(self._links.values()):
                if are_ready or link not in members:
                    self._say_ready_on(link)

    def _say_ready_on(self, link: Link) -> None:
        try:
            link.say_ready()
        except OSError as error:
            # A peer that is settled may have returned and closed before it heard from us.
            if not link.is_settled:
                self._lose(link, error)

    def _is_open(self) -> bool:
        """Whether we have all our links."""
        if len(self._links) < len(self._direct) or not all(
            link.is_open for link in self._links.values()
        ):
            return False
        introduces = self._locals[0] == self._rank and len(self._locals) > 1
        return not introduces or (self._introduction is not None and self._introduction.is_done)

    def _is_complete(self) -> bool:
        return self._is_open() and all(link.is_settled for link in self._links.values())

    def _wake_at(self, deadline: float) -> float:
        times = [deadline, *self._dial_until_pending()]
        if self._needs_store():
            times += [self._roster.read_at, self._reread_at]
        expiry = self._door.next_deadline()
        if expiry is not None:
            times.append(expiry)
        if self._introduction is not None and not self._introduction.is_done:
            times.append(time.monotonic() + _FIRST_RETRY_S)
        return min(times)

    def _dial_until_pending(self) -> list[float]:
        """When a dial ends, or when one may start again."""
        until = [self._dial_until[rank] for rank in self._dials]
        idle = [at for rank, at in self._dial_at.items() if self._is_idle(rank)]
        return until + idle

    def _is_idle(self, rank: int) -> bool:
        if rank > self._rank or rank in self._links or rank in self._dials:
            return False
        if rank not in self._direct:
            return False
        return self._roster.target(rank) is not None

    def _membership(self) -> Membership:
        epoch = self._epoch
        if epoch is None:  # alone: nobody was waited for, nothing was read
            epoch = epoch_of([self._roster.own.nonce])
        peers = []
        while self._links:
            _, link = self._links.popitem()
            address = _address(link.sock)
            for rank, (socket_fd, fds) in link.detach().items():
                host_id, label = self._roster.host_id(rank), self._label(rank)
                peers.append(PeerInfo(rank, label, host_id, address, link.is_local, socket_fd, fds))
        peers.sort(key=lambda peer: peer.rank)
        own = self._roster.own
        key = self._roster.job_key
        cards = self._roster.cards()
        return Membership(epoch, self._rank, self._size, own.host_id, tuple(peers), cards, key)

    def _label(self, rank: int) -> str:
        record = self._roster.record(rank)
        return record.host_label if record is not None else "an unknown host"


def _address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "unix"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # it has gone in this very moment; the engine will find out
        return "gone"
    return str(Endpoint(host, port, ""))
