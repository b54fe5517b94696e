"""The connections of one rank in one attempt: its endpoint, its dial upwards, and its links."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from shoal.engine import Endpoint, Hello, Progress
from shoal.errors import UsageError
from shoal.rendezvous.explain import explain
from shoal.rendezvous.key import HOW_TO_SET_KEY, pair_key
from shoal.rendezvous.links import TreeLinks
from shoal.rendezvous.listener import (
    is_out_of_descriptors,
    listen_for_hosts,
    note_turned_away,
    port_range,
)
from shoal.rendezvous.roster import MAX_ENTRY_BYTES
from shoal.rendezvous.tree import Tree

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from shoal.engine import Peer
    from shoal.rendezvous.meeting import Meeting
    from shoal.rendezvous.options import HostMemory, JoinOptions
    from shoal.rendezvous.record import Endpoint as Place
    from shoal.rendezvous.roll import Roll

MEETING_PATH: Final = 2**32 - 1
"""The path in HELLO that means a connection for the meeting, NOT for the native core, which listens
at the same port later."""

# Between two looks for the address of the rank above; doubles.
_FIRST_LOOK_S: Final = 0.001
_LONGEST_LOOK_S: Final = 0.2


class LinkLostError(Exception):
    """A link broke, so this attempt must end; the reason is a verb phrase about this rank.

    `has_reported`: True if the rank above counts on this rank.
    """

    def __init__(self, why: str, has_reported: bool) -> None:
        super().__init__(why)
        self.has_reported = has_reported


class Connections:
    """One rank's connections; owns their endpoint. `listener` is for the ranks of this host.

    Calls `on_doubt` when this attempt may have ended: a link broke, or a key was wrong.
    """

    def __init__(
        self,
        meeting: Meeting,
        memory: HostMemory,
        options: JoinOptions,
        listener: socket.socket,
        on_doubt: Callable[[], None],
    ) -> None:
        self.links: TreeLinks | None = None  # once there is a roll
        self.listens_at: tuple[Place, ...] = ()  # for other hosts, by path
        self.endpoint = Endpoint(
            self,
            pending_s=options.pending_s,
            dial_s=options.dial_s,
            most_queued=(1 + meeting.size) * MAX_ENTRY_BYTES,
        )
        self.endpoint.listen(listener.detach())
        self.meeting, self._memory, self._options = meeting, memory, options
        self._on_doubt = on_doubt
        self.trouble: dict[int, str] = {}  # by rank, the last error with it
        self.above_at: Place | str | None = None  # the address of the rank above, once known
        self._look_at, self._look_s = 0.0, _FIRST_LOOK_S

    def begin(self, roll: Roll) -> TreeLinks:
        """Connect along the tree of this roll."""
        tree = Tree(roll.hosts, self.meeting.rank)
        makes = tree.is_leader and self.meeting.size > 1
        memory_fd = self._memory.make(len(tree.host)) if makes else -1
        self.links = TreeLinks(tree, self.meeting.rank, memory_fd, self._lost, self._memory.enter)
        if tree.n_hosts > 1:
            self._listen_for_hosts(tree)
        return self.links

    def dial(self, roll: Roll, now: float) -> float:
        """Connect to the rank above once its address is known; return when to call this again."""
        above = None if self.links is None else self.links.tree.parent
        if self.links is None or above is None or self.above_at is not None:
            return float("inf")
        if now < self._look_at:
            return self._look_at
        is_local, meeting = self.links.tree.is_local(above), self.meeting
        at = roll.leader_names[roll.hosts[above]] if is_local else meeting.endpoint(above)
        self._look_at, self._look_s = now + self._look_s, min(2 * self._look_s, _LONGEST_LOOK_S)
        if at is None:
            return self._look_at
        self.above_at = at
        hello = Hello(roll.epoch, meeting.rank, above, MEETING_PATH)
        key = pair_key(meeting.job_key, roll.epoch, meeting.rank, above)
        if isinstance(at, str):
            self.endpoint.connect_local(at, hello, key)
        else:
            self.endpoint.connect(at.address, at.port, hello, key)
        return float("inf")

    def explain(self, verdict: str, silence: str) -> str:
        """Describe the missing ranks; see explain.py."""
        text, n = explain(self, verdict, silence), self.endpoint.n_turned_away
        lack = f"; this process turned away {n} callers for lack of file descriptors (`ulimit -n`)"
        return text + (lack if n else "")

    def _listen_for_hosts(self, tree: Tree) -> None:
        meeting, environ = self.meeting, self._options.environ
        master = environ.get("MASTER_ADDR") or meeting.store_host
        ports = port_range(environ)
        listeners, paths = listen_for_hosts(f"rank {meeting.rank}", master, ports, environ)
        for listener in listeners:
            self.endpoint.listen(listener.detach())
        self.listens_at = tuple(paths)
        if meeting.rank == 0 and not meeting.own.has_own_key:
            self._options.log.warning(
                "this job spans hosts without a job key, so anyone who can reach its store can "
                "join it: set SHOAL_KEY_FILE to a file of mode 0600 with the same key on every host"
            )
        if tree.has_hosts_below:
            meeting.publish(meeting.own._replace(endpoint=self.listens_at[0]))

    # The endpoint's callbacks for callers.

    def admit(self, hello: Hello) -> bytes | Progress:
        """Return the pair's key for a caller that is a rank below this one in this epoch."""
        rank, roll = self.meeting.rank, self.meeting.roll
        is_ours = hello.to_rank == rank < hello.rank < self.meeting.size
        if not is_ours or hello.path != MEETING_PATH:
            return Progress.REFUSED
        if self.links is None or roll is None or hello.epoch != roll.epoch:
            return Progress.STALE  # usually it has just seen the roll earlier than this rank
        if not self.links.expects(hello.rank):
            return Progress.REFUSED
        return pair_key(self.meeting.job_key, hello.epoch, rank, hello.rank)

    def welcome(self, peer: Peer, hello: Hello) -> None:
        """Link an authenticated rank below; a second connection means that it lost the first."""
        links = self.links
        is_expected = links is not None and links.expects(hello.rank)
        if links is None or not is_expected or peer.is_local is not links.tree.is_local(hello.rank):
            peer.close()
            return
        links.add(hello.rank, peer)
        self.trouble.pop(hello.rank, None)

    def key_differs(self, hello: Hello) -> None:
        """Record it for the error text, and check soon whether that rank has left."""
        self.trouble[hello.rank] = f"it holds another job key. {HOW_TO_SET_KEY}"
        self._on_doubt()

    turned_away = staticmethod(note_turned_away)

    # The endpoint's callbacks for the dial to the rank above.

    def reached(self, peer: Peer, _dial: int) -> None:
        """Link the rank above, which has proved the key."""
        if self.links is not None and self.links.tree.parent is not None:
            self.links.add(self.links.tree.parent, peer)

    def not_reached(self, _dial: int, error: int, progress: Progress, _was_connected: bool) -> None:
        """Record why the dial failed; the endpoint dials again."""
        above = None if self.links is None else self.links.tree.parent
        if above is None:
            return
        why = OSError(error, os.strerror(error))
        if is_out_of_descriptors(why):
            raise why  # not a fault of the network
        if progress is Progress.KEY_DIFFERS:
            raise UsageError(
                f"rank {self.meeting.rank} may not join: rank {above} on "
                f"{self.meeting.label(above)} holds another job key. {HOW_TO_SET_KEY}"
            )
        if progress is Progress.STALE:
            self.trouble[above] = "it is in another epoch, perhaps still in an earlier group"
        elif progress is Progress.REFUSED:
            self.trouble[above] = "the process that answered there is not that rank"
        elif error == errno.ETIMEDOUT:
            self.trouble[above] = f"no answer within {self._options.dial_s:g} s"
        elif error == errno.EPERM and isinstance(self.above_at, str):
            self.trouble[above] = "the process that listens there belongs to another user"
        else:
            self.trouble[above] = os.strerror(error).lower()

    # The links.

    def received(self, peer: Peer, kind: int, body: bytes, fd: int) -> None:
        """Pass a message on to the links."""
        if self.links is not None:
            self.links.receive(peer, kind, body, fd)

    def lost(self, peer: Peer, error: int, why: str) -> None:
        """Pass the loss on to the links."""
        if error == errno.EMFILE:
            raise UsageError(
                f"rank {self.meeting.rank} has no file descriptor left for shared memory: raise "
                "`ulimit -n`"
            )
        if self.links is not None:
            self.links.lose(peer, OSError(error, why))

    def _lost(self, rank: int, error: OSError) -> None:
        links = self.links
        if links is None or links.is_concluded:
            return  # the group has formed, and the other rank may have left it already
        why = self.trouble[rank] = (error.strerror or str(error)).lower()
        if links.needs(rank):
            waited = "" if links.awaited is None else f", which waited for rank {links.awaited}"
            raise LinkLostError(f"lost its link to rank {rank}{waited}: {why}", links.has_reported)
        self._on_doubt()
