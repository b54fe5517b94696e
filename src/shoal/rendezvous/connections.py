"""The connections of one rank in one attempt: its acceptor, its way up, its links."""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING

from shoal.engine import Hello, Progress
from shoal.rendezvous.acceptor import Acceptor, is_out_of_descriptors
from shoal.rendezvous.connector import MEETING_PATH, Connector, Way
from shoal.rendezvous.explain import explain
from shoal.rendezvous.key import HOW_TO_SET_KEY, pair_key
from shoal.rendezvous.links import TreeLinks
from shoal.rendezvous.listener import listen_for_hosts, port_range
from shoal.rendezvous.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.rendezvous.meeting import Meeting
    from shoal.rendezvous.options import HostMemory, JoinOptions
    from shoal.rendezvous.record import Endpoint
    from shoal.rendezvous.roll import Roll


class LinkLostError(Exception):
    """A link broke, and with it this attempt.

    Args:
        why: a verb phrase, of this rank.
        has_reported: whether the rank above counts on us.
    """

    def __init__(self, why: str, has_reported: bool) -> None:
        super().__init__(why)
        self.has_reported = has_reported


class Connections:
    """All of them; the owner of its own acceptor.

    Args:
        listener: where the ranks of our host connect.
        on_doubt: called when this attempt may have ended: a link broke, a key was wrong.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        meeting: Meeting,
        memory: HostMemory,
        options: JoinOptions,
        listener: socket.socket,
        on_doubt: Callable[[], None],
    ) -> None:
        self.links: TreeLinks | None = None  # once there is a roll
        self.listens_at: tuple[Endpoint, ...] = ()  # for other hosts, by path
        self.acceptor = Acceptor(selector, self, options.limits)
        self.acceptor.open(listener)
        self._selector, self._meeting = selector, meeting
        self._memory, self._options = memory, options
        self._on_doubt = on_doubt
        self._trouble: dict[int, str] = {}  # what went wrong with a rank last
        self._connector: Connector | None = None

    def begin(self, roll: Roll) -> TreeLinks:
        """Connect along the tree of this roll."""
        rank, epoch, key = self._meeting.rank, roll.epoch, self._meeting.job_key
        tree = Tree(roll.hosts, rank)
        makes = tree.is_leader and self._meeting.size > 1
        memory_fd = self._memory.make(len(tree.host)) if makes else -1

        def secret(other: int, role: str) -> bytes:
            return pair_key(key, epoch, rank, other, role)

        links = TreeLinks(
            self._selector, tree, rank, secret, memory_fd, self._lost, self._memory.enter
        )
        self.links = links
        if tree.n_hosts > 1:
            self._listen_for_hosts(tree)
        if tree.parent is not None:
            self._connector = self._connector_to(tree.parent, roll, tree.is_local(tree.parent))
        return links

    def dial(self, now: float) -> float:
        """Connect to the rank above, if we are not; returns when to go on with it."""
        if self._connector is None or self.links is None or not self.links.lacks_above:
            return float("inf")
        return self._connector.step(now)

    def explain(self, verdict: str, silence: str) -> str:
        """What is lacking, in words; see explain.py."""
        at = None if self._connector is None else self._connector.at
        text = explain(self._meeting, self.links, self._trouble, at, verdict, silence)
        n = self.acceptor.n_turned_away
        lack = f"; this process turned away {n} callers for want of a file descriptor (`ulimit -n`)"
        return text + (lack if n else "")

    def close(self) -> None:
        """Close everything that has not been handed out; idempotent."""
        self.acceptor.close()
        if self._connector is not None:
            self._connector.close()
        if self.links is not None:
            self.links.close()

    def _connector_to(self, above: int, roll: Roll, is_local: bool) -> Connector:
        meeting = self._meeting

        def target() -> Endpoint | str | None:
            return roll.leader_names[roll.hosts[above]] if is_local else meeting.endpoint(above)

        hello = Hello(roll.epoch, meeting.rank, above, MEETING_PATH)
        key = pair_key(meeting.job_key, roll.epoch, meeting.rank, above)
        way = Way(hello, key, target, f"rank {above} on {meeting.label(above)}")
        dial_s = self._options.dial_s
        return Connector(self._selector, dial_s, way, self._reached, self._not_reached)

    def _listen_for_hosts(self, tree: Tree) -> None:
        meeting, environ = self._meeting, self._options.environ
        master = self._options.master_addr or environ.get("MASTER_ADDR") or meeting.store_host
        ports = port_range(environ)
        listeners, paths = listen_for_hosts(meeting.rank, master, ports, environ)
        for listener in listeners:
            self.acceptor.open(listener)
        self.listens_at = tuple(paths)
        if meeting.rank == 0 and not meeting.own.has_own_key:
            self._options.log.warning(
                "this job spans hosts without a job key, so whoever reaches its store can join "
                "it: set SHOAL_KEY_FILE to a file of mode 0600 with the same key on every host"
            )
        if tree.has_hosts_below:
            meeting.publish(meeting.own._replace(endpoint=self.listens_at[0]))

    # The way up.

    def _reached(self, sock: socket.socket) -> None:
        if self.links is not None and self.links.tree.parent is not None:
            self.links.add(self.links.tree.parent, sock)

    def _not_reached(self, why: OSError | Progress) -> None:
        above = None if self.links is None else self.links.tree.parent
        if above is None:
            return
        if isinstance(why, OSError) and is_out_of_descriptors(why):
            raise why  # no network is to blame
        if why is Progress.STALE:
            self._trouble[above] = "it is in another epoch, perhaps still in an earlier group"
        elif isinstance(why, Progress):
            self._trouble[above] = "what answered there did not prove to be that rank"
        else:
            self._trouble[above] = (why.strerror or str(why)).lower()

    def _lost(self, rank: int, error: OSError) -> None:
        """A link broke."""
        links = self.links
        if links is None or links.is_concluded:
            return  # it is lost to the group that has formed, or it has left that again
        why = self._trouble[rank] = (error.strerror or str(error)).lower()
        if links.needs(rank):
            lacked = "" if links.lacked is None else f", which still lacked rank {links.lacked}"
            raise LinkLostError(f"lost its link to rank {rank}{lacked}: {why}", links.has_reported)
        self._on_doubt()

    # The acceptor's owner's part.

    def admit(self, hello: Hello) -> bytes | Progress:
        """The pair's key for a rank that is below ours in our epoch."""
        rank = self._meeting.rank
        is_ours = hello.to_rank == rank < hello.rank < self._meeting.size
        if not is_ours or hello.path != MEETING_PATH:
            return Progress.REFUSED
        if self.links is None or not self._is_of_our_epoch(hello):
            return Progress.STALE  # often it has simply seen the roll before we did
        if not self.links.expects(hello.rank):
            return Progress.REFUSED
        return pair_key(self._meeting.job_key, hello.epoch, rank, hello.rank)

    def _is_of_our_epoch(self, hello: Hello) -> bool:
        return self._meeting.roll is not None and hello.epoch == self._meeting.roll.epoch

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """A rank below has proved itself. One that connects again has lost its first link."""
        links, is_local = self.links, sock.family == socket.AF_UNIX
        is_expected = links is not None and links.expects(hello.rank)
        if links is None or not is_expected or is_local is not links.tree.is_local(hello.rank):
            sock.close()
            return
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ)
        links.add(hello.rank, sock)
        self._trouble.pop(hello.rank, None)

    def key_differs(self, hello: Hello) -> None:
        """Remember it for the deadline, and look soon whether it has left."""
        self._trouble[hello.rank] = f"it holds another job key. {HOW_TO_SET_KEY}"
        self._on_doubt()
