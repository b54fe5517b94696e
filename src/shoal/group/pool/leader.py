"""The lowest worker, which decides what all do: who is in the next view, and when one is over."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.group.context import hash_of
from shoal.group.pool.addresses import MOST_SERVERS, Address, JobEndpoint
from shoal.group.pool.commands import Command, End, Form
from shoal.group.pool.late import LateServers
from shoal.group.pool.left_out import LeftOut
from shoal.group.pool.notices import Notices
from shoal.group.pool.protocol import Meet, Note, Reserve, own_version
from shoal.group.pool.registry import Registry
from shoal.group.pool.watch import Watch
from shoal.rendezvous.interface import choose_address
from shoal.rendezvous.listener import port_range
from shoal.rendezvous.store.server import StoreLimits, TcpStoreServer

if TYPE_CHECKING:
    from shoal.group.pool.bell import Bell
    from shoal.group.pool.control import Control
    from shoal.group.pool.stages import Stages
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

_SETTLE_S: Final = 0.1
_LEAST_PAUSE_S: Final = 0.25  # until servers that did not come are asked again; twice as long then
_LONGEST_PAUSE_S: Final = 8.0
_MOST_NAMED: Final = 4  # workers, in a line
_MOST_NAME: Final = 64  # letters of a group's

Unheard = Mapping[int, Sequence[int]]
"""By a server's place in a view, the workers that have not received its first word."""

_now: Final = time.monotonic


def job_name(control: Control, host: str) -> str:
    """For people, and for servers, which end the oldest views of a job that has too many.

    Several jobs may have one key and begin on one host, and several groups of one job one name: the
    number of the mesh is random, and that of the group is its own.
    """
    name = control.name.removesuffix("/pool control")
    if len(name) > _MOST_NAME:  # as torch's may be
        name = (
            f"{name[: _MOST_NAME - 9]}.{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
        )
    return f"{name} {hash_of(control.epoch, control.native_id):016x} of {host}"


class Leader:
    """What only the lowest worker does: it watches the servers, and decides on the next command.

    Args:
        endpoint: where further servers may leave their addresses.
        bell: rung when a server comes or goes.

    Threads: `close` and `trouble` may be called from any, the rest from the pool's.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        key: bytes,
        bell: Bell,
        endpoint: JobEndpoint | None = None,
    ) -> None:
        self._servers, self._key, self._endpoint = servers, key, endpoint
        self._registry: Registry | None = None
        self._bell = bell
        self._watch: Watch | None = None
        self._meeting: TcpStoreServer | None = None
        self._wanted: tuple[Address, ...] = ()  # the servers of the view that forms
        self._host = ""
        self._n_views = self._n_failures = 0
        self._not_before, self._pause_s = 0.0, _LEAST_PAUSE_S
        self._rest_s = _LEAST_PAUSE_S  # after a view that its members ended
        self._seen: list[Address] = []
        self._misplaced: dict[Address, str] = {}
        self._left_out, self._notices = LeftOut(), Notices(_now())
        self._names: Sequence[object] = ()
        self._late = LateServers()
        self._invited: set[Address] = set()
        self._has_lost_invited = False
        self._seen_at = 0.0
        self._is_closed = False

    def begin(self, control: Control) -> None:
        """Begin to watch the servers."""
        self._names = control.names
        self._host = choose_address(os.environ.get("MASTER_ADDR")).address
        reserve = Reserve(own_version(), job_name(control, self._host), control.size)
        self._watch = Watch(self._servers, self._key, reserve, self._changed)
        if self._endpoint is not None:
            self._registry = Registry(self._endpoint, self._key, self._found)
        if self._is_closed:
            self.close()

    def _found(self, address: Address) -> None:
        """A server has left its address; on a thread of its own."""
        if address in self._servers or len(self._servers) >= MOST_SERVERS or self._watch is None:
            return
        self._servers = [*self._servers, address]
        self._watch.add(address)
        self._bell.ring()

    def decide(
        self, views: Sequence[View], stages: Stages[View], lowest_open: int
    ) -> Command | None:
        """Return the next command; None if nothing is to change.

        Args:
            lowest_open: the lowest call that this worker may yet make.
        """
        self._notices.update(stages.last.servers if stages.last else (), self._trouble(), _now())
        command = self._ending(views, lowest_open) or self._forming(stages)
        if self._is_closed:  # a rank that leaves has lost its own servers, and nobody else has
            self._close_meeting()
            return None
        if command is None and stages.last is not None:
            self._late.look(stages.last, _now())
        return command

    def _ending(self, views: Sequence[View], lowest_open: int) -> End | None:
        gone = self._watch.gone() if self._watch is not None and views else set()
        for view in views:
            if view.has_ended or not gone.isdisjoint(view.servers):
                self._blame(view, gone)
                return End(view.number, is_lost=True)
            if view.end is not None and view.is_idle(lowest_open):
                return End(view.number, is_lost=False)
        return None

    def _blame(self, view: View, gone: set[Address]) -> None:
        """Leave out the server that a view has ended by, should it still answer rank 0."""
        found = view.culprit()
        if found is None:
            self._rest(view)
        if found is None or found[0] in gone or self._watch is None:
            return
        address, why = found
        identity = self._watch.ready().get(address)
        self._left_out.blame(address, identity, why, _now())

    def _rest(self, view: View) -> None:
        """A view that ended by what its members said of each other: the next may, too."""
        why = view.group.ended()
        if why is None or isinstance(why, PeerLost):
            return
        _LOG.warning("view %d of the servers has ended: %s", view.number, why)
        self._not_before = _now() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_PAUSE_S)

    def _forming(self, stages: Stages[View]) -> Command | None:
        if self._watch is None or _now() < self._not_before:
            return None
        last = stages.last
        may_serve = self._left_out.may_serve(self._watch.ready(), _now())
        wanted = [one for one in may_serve if one not in self._misplaced]
        if self._is_unsettled(wanted):
            return None
        if wanted == (list(last.servers) if last is not None else []):
            return None
        if not wanted and last is not None:
            return End(last.number, is_lost=False)
        if self._n_failures > 1 and len(wanted) > 1:
            # One of them may be what nobody can reach: each in turn is left out.
            del wanted[self._n_failures % len(wanted)]
        return self._form(wanted)

    def _form(self, wanted: Sequence[Address]) -> Form | None:
        """A view with these servers, if there can be a store for its members to meet at."""
        number = self._n_views + 1
        try:
            self._meeting = self._serve_store(StoreLimits())
        except (ShoalError, OSError) as error:  # no port, thread or descriptor is free
            self._put_off(number, str(error))
            return None
        self._n_views, self._wanted = number, tuple(wanted)
        return Form(number)

    def _is_unsettled(self, wanted: list[Address]) -> bool:
        """Whether others may be about to come: then one view is formed for all of them."""
        now = _now()
        if wanted != self._seen:
            self._seen, self._seen_at = wanted, now
        return len(wanted) < len(self._servers) and now < self._seen_at + _SETTLE_S

    def invite(self, command: Form, n_workers: int) -> str:
        """Ask the servers into a view; return who they are, and where all meet."""
        assert self._meeting is not None
        servers, size = self._wanted, n_workers + len(self._wanted)
        where = self._host, self._meeting.port
        meets = [
            (address, Meet(command.view, n_workers, n_workers + at, size, *where))
            for at, address in enumerate(servers)
        ]
        self._invited, self._has_lost_invited = set(servers), False
        if self._watch is not None:
            self._watch.meet(meets)
        return f"{','.join(map(str, servers))} {self._host} {self._meeting.port}"

    def _changed(self) -> None:
        """A server has come or gone; on the thread that watches."""
        if self._watch is not None and not self._invited.isdisjoint(self._watch.gone()):
            self._has_lost_invited = True
            self._close_meeting()  # whoever waits there for it need not wait until time is up
        self._bell.ring()

    def formed(self, view: View, steps: bytes) -> None:
        """Record that a view stands; the next may form at once.

        Args:
            steps: by server, how far below a worker's its rate was measured to be.
        """
        self._left_out.used(view.servers)
        rates = view.group.rates[view.n_workers :]
        each = zip(view.servers, rates, view.nics.servers, steps, strict=True)
        self._notices.take({one: (nic.out, step) for one, rate, nic, step in each if not rate})
        self._invited = set()
        self._close_meeting()
        if self._n_failures > 1:  # with one left out, perhaps: not at once again with it
            self._not_before = _now() + _LONGEST_PAUSE_S
        self._n_failures, self._pause_s = 0, _LEAST_PAUSE_S

    def failed(self, command: Form, why: str, misplaced: int, unheard: Unheard) -> None:
        """Record that a view did not form: leave out the server at fault, or wait.

        Args:
            why: empty if only other workers failed.
            misplaced: the place of a server that can be in no view, or -1.
            unheard: the servers that some workers did not reach.
        """
        self._invited = set()
        self._close_meeting()
        if misplaced >= 0:
            address = self._wanted[misplaced]
            self._misplaced[address] = why
            return
        if self._has_lost_invited:  # `Notices` says so
            return
        if unheard:
            self._blame_unheard(unheard)
            return
        self._put_off(command.view, why or "another worker says why")
        self._n_failures += 1

    def _put_off(self, view: int, why: str) -> None:
        """Try again later, and later each time; log the first of a row of failures."""
        _LOG.log(
            logging.WARNING if self._pause_s == _LEAST_PAUSE_S else logging.DEBUG,
            "view %d of the servers did not form: %s; tried again in %.3g s, then less often",
            *(view, why, self._pause_s),
        )
        self._not_before = _now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _blame_unheard(self, unheard: Unheard) -> None:
        ready = self._watch.ready() if self._watch is not None else {}
        for at, workers in unheard.items():
            address = self._wanted[at]
            who = ", ".join(f"rank {rank} ({self._names[rank]})" for rank in workers[:_MOST_NAMED])
            more = f" and {len(workers) - _MOST_NAMED} more" if len(workers) > _MOST_NAMED else ""
            why = f"cannot reach {who}{more}, or they it"
            self._left_out.blame(address, ready.get(address), why, _now())

    def note(self, view: int, kind: str, how: str) -> None:
        """Send every server how a kind of call is made, for `shoal status`."""
        if self._watch is not None:
            self._watch.tell(Note(view, kind, how))

    def trouble(self) -> str:
        """Return which servers do not serve, and why."""
        return "; ".join(f"{address} {why}" for address, why in self._trouble().items())

    def _trouble(self) -> dict[Address, str]:
        watched = self._watch.trouble() if self._watch is not None else {}
        return {**self._left_out.why(), **watched, **self._misplaced}

    def close(self) -> None:
        """Leave the servers; idempotent."""
        self._is_closed = True
        if self._registry is not None:
            self._registry.close()
        if self._watch is not None:
            self._watch.close()
        self._close_meeting()

    def _serve_store(self, limits: StoreLimits) -> TcpStoreServer:
        """A store at a port that may be used."""
        for port in port_range(os.environ):
            with contextlib.suppress(UsageError):
                return TcpStoreServer(self._host, port, key=self._key, limits=limits)
        raise UsageError(f"no port of SHOAL_PORT_RANGE is free at {self._host}; widen it")

    def _close_meeting(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
