"""The lowest worker decides which servers are in the next view, and when a view ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost
from shoal.group.context import hash_of
from shoal.group.pool.addresses import MOST_SERVERS, Address, JobEndpoint
from shoal.group.pool.control import Command, What
from shoal.group.pool.notices import LateServers, Notices
from shoal.group.pool.protocol import Meet, Reserve
from shoal.group.pool.registry import Registry
from shoal.group.pool.watch import Watch
from shoal.plan.text import listed
from shoal.rendezvous.announcing import own_version
from shoal.rendezvous.interface import choose_address
from shoal.rendezvous.packing import number

if TYPE_CHECKING:
    from shoal.group.pool.control import Bell, Control
    from shoal.group.pool.stages import Stages
    from shoal.group.pool.view import View
    from shoal.rendezvous.roster import Entry

_LOG: Final = logging.getLogger("shoal")

_SETTLE_S: Final = 0.1
# A server that has sent no entry for the next view this long after the last invitation cannot
# listen, and the others do not wait for it.
_ENTRY_S: Final = 4.0
_LEAST_PAUSE_S: Final = 0.25  # after a view that did not form; doubles each time
_LONGEST_PAUSE_S: Final = 8.0
# A server whose link flapped is used again after the least absence. Each try costs a process on
# every server; no call waits for it. A healed link stays unused for the longest absence at most.
_LEAST_ABSENCE_S: Final = 1.0
_LONGEST_ABSENCE_S: Final = 32.0
# A server that is not blamed for this many times its last absence begins again with the least one.
_N_FORGIVEN: Final = 4
_MOST_NAMED: Final = 4  # workers, in a line
_MOST_NAME: Final = 64  # letters of a group's name

Unreached = Mapping[int, Sequence[int]]
"""By a server's place in a view, the workers that have not received its first word."""

_now: Final = time.monotonic


def job_name(control: Control, host: str) -> str:
    """Return a job's name, which servers use to count its views, and show to people.

    Several jobs may share a key and a first host, and several groups of a job may share a name. So
    the name contains a hash of the mesh's random number and the group's number.
    """
    name = control.name.removesuffix("/pool control")[:_MOST_NAME]  # torch's may be longer
    return f"{name} {hash_of(control.epoch, control.native_id):016x} of {host}"


@dataclass
class _Absence:
    """A server's process, by its identity, that is left out until a time.

    `why` is a verb phrase; empty once a view with the server stands again.
    """

    identity: bytes | None
    pause_s: float
    not_before: float
    why: str

    def lasts(self, identity: bytes, now: float) -> bool:
        """Return True if the process with this identity is still left out."""
        return self.identity == identity and now < self.not_before


class LeftOut:
    """Servers that are left out for a while. Takes the time as an argument.

    A server may answer the lowest worker though another worker cannot reach it. Unless it is left
    out, view after view forms with it and ends because of it.
    """

    def __init__(self) -> None:
        self._absences: dict[Address, _Absence] = {}

    def blame(self, address: Address, identity: bytes | None, why: str, now: float) -> None:
        """Leave a server out, twice as long as the last time; `why` is a verb phrase."""
        last, pause_s = self._absences.get(address), _LEAST_ABSENCE_S
        if last is not None and last.identity == identity:
            forgiven_at = last.not_before + _N_FORGIVEN * last.pause_s
            pause_s = min(2 * last.pause_s, _LONGEST_ABSENCE_S) if now < forgiven_at else pause_s
        self._absences[address] = _Absence(identity, pause_s, now + pause_s, why)

    def used(self, addresses: Iterable[Address]) -> None:
        """Record that a view stands with these servers."""
        for address in addresses:
            if address in self._absences:
                self._absences[address].why = ""

    def may_serve(self, ready: Mapping[Address, bytes], now: float) -> list[Address]:
        """Return the servers of `ready`, which has their identities, that may be in a view."""
        absences = ((one, self._absences.get(one), ready[one]) for one in ready)
        return [one for one, last, own in absences if last is None or not last.lasts(own, now)]

    def why(self) -> dict[Address, str]:
        """Return the reason for each server that is left out."""
        return {address: last.why for address, last in self._absences.items() if last.why}


class Leader:
    """Runs on the lowest worker: watches the servers, and decides on the next command.

    Further servers may register at `endpoint`. Rings the bell when a server appears or is lost.
    Threads: `close` and `trouble` may be called from any, the rest from the pool's.
    """

    def __init__(
        self,
        control: Control,
        servers: Sequence[Address],
        key: bytes,
        bell: Bell,
        endpoint: JobEndpoint | None = None,
    ) -> None:
        self._servers, self._bell = servers, bell
        self._workers = control.ranks
        self._wanted: tuple[Address, ...] = ()  # the servers of the view that forms
        self._n_views = self._n_failures = 0
        self._not_before, self._pause_s = 0.0, _LEAST_PAUSE_S
        self._rest_s = _LEAST_PAUSE_S  # after a view that ended by another error than a loss
        self._seen: list[Address] = []
        self._seen_at = 0.0
        self._left_out, self._notices = LeftOut(), Notices(_now())
        self._late = LateServers()
        self._invited: dict[Address, bytes | None] = {}  # to the view that forms
        self._lost: set[Address] = set()  # invited servers that have lost their connection
        self._invited_at = 0.0
        self._is_closed = False
        host = choose_address(os.environ.get("MASTER_ADDR")).address
        reserve = Reserve(own_version(), job_name(control, host), control.size)
        self._watch = Watch(servers, key, reserve, self._changed)
        try:
            self._registry = Registry(endpoint, key, self._found) if endpoint is not None else None
        except BaseException:
            self._watch.close()
            raise

    def _found(self, address: Address) -> None:
        """Add a server that has registered. Called on the registry's thread."""
        if address in self._servers or len(self._servers) >= MOST_SERVERS:
            return
        self._servers = [*self._servers, address]
        self._watch.add(address)
        self._bell.ring()

    def decide(
        self, views: Sequence[View], stages: Stages[View], lowest_open: int
    ) -> Command | None:
        """Return the next command, or None; all calls below `lowest_open` were made here."""
        self._notices.update(stages.last.servers if stages.last else (), self._trouble(), _now())
        command = self._ending(views, lowest_open) or self._forming(stages)
        if self._is_closed:  # this rank disconnected from its servers; other ranks did not
            return None
        if command is None and stages.last is not None:
            self._late.look(stages.last, _now())
        return command

    def _ending(self, views: Sequence[View], lowest_open: int) -> Command | None:
        gone = self._watch.gone() if views else set()
        for view in views:
            if view.has_ended or not gone.isdisjoint(view.servers):
                self._blame(view, gone)
                return Command(What.LOSE, view.number)
            if view.end is not None and view.is_idle(lowest_open):
                return Command(What.END, view.number)
        return None

    def _blame(self, view: View, gone: set[Address]) -> None:
        """Leave out the server whose loss ended a view, if it still answers rank 0."""
        found = view.culprit()
        if found is None:
            self._rest(view)
        if found is None or found[0] in gone:
            return
        address, why = found
        identity = self._watch.ready().get(address)
        self._left_out.blame(address, identity, why, _now())
        self._watch.check(address)

    def _rest(self, view: View) -> None:
        """Pause after a view that ended by another error than a loss: the next may do the same."""
        why = view.group.ended()
        if why is None or isinstance(why, PeerLost):
            return
        _LOG.warning("view %d of the servers has ended: %s", view.number, why)
        self._not_before = _now() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_PAUSE_S)

    def _forming(self, stages: Stages[View]) -> Command | None:
        if _now() < self._not_before:
            return None
        last = stages.last
        serving = list(last.servers) if last is not None else []
        wanted = self._left_out.may_serve(self._watch.ready(), _now())
        if self._is_unsettled(wanted) or wanted == serving:
            return None
        if not wanted and last is not None:
            return Command(What.END, last.number)
        places = self._watch.places()
        if _now() >= self._invited_at + _ENTRY_S:
            wanted = [one for one in wanted if one in places]
        are_placed = all(one in places for one in wanted)  # else their entries are on the way
        if wanted in ([], serving) or not are_placed or self._misplace(wanted, places):
            return None
        if self._n_failures > 1 and len(wanted) > 1:
            # A server may be unreachable: leave out each in turn.
            del wanted[self._n_failures % len(wanted)]
        self._n_views += 1
        self._wanted = tuple(wanted)
        return Command(What.FORM, self._n_views)

    def _misplace(self, wanted: Sequence[Address], places: Mapping[Address, Entry]) -> bool:
        """Leave out servers that share a host, as they save nothing; return True if any does."""
        hosts = {info.host_id: f"worker {info}" for info in self._workers}
        ready, has_any = self._watch.ready(), False
        for one in wanted:
            entry = places[one]
            if entry.host_id in hosts:
                has_any = True
                why = (
                    f"is on {entry.host_label}, the host of {hosts[entry.host_id]}: leave it out "
                    "of SHOAL_SERVERS; a server helps only if it has its own link"
                )
                self._left_out.blame(one, ready.get(one), why, _now())
            hosts.setdefault(entry.host_id, f"server {one}")
        return has_any

    def _is_unsettled(self, wanted: list[Address]) -> bool:
        """Return True if more servers may appear soon, so that one view has all of them."""
        now = _now()
        if wanted != self._seen:
            self._seen, self._seen_at = wanted, now
        return len(wanted) < len(self._servers) and now < self._seen_at + _SETTLE_S

    def invite(self, view: int, workers: Sequence[bytes]) -> tuple[Sequence[Address], bytes]:
        """Invite the servers to a view of workers with these entries.

        Returns the servers, and their part of the roster; empty if a server is gone.
        """
        servers, places = self._wanted, self._watch.places()
        if any(one not in places for one in servers):
            return servers, b""
        n, size = len(workers), len(workers) + len(servers)
        own = b"".join(places[one].encode(n + at) for at, one in enumerate(servers))
        roster = b"".join([*workers, own])
        ready = self._watch.ready()
        self._lost, self._invited_at = set(), _now()
        self._invited = {one: ready.get(one) for one in servers}
        self._watch.meet(
            (one, Meet(view, n, n + at, size, roster)) for at, one in enumerate(servers)
        )
        self._changed()  # a server may have been lost just before `_invited` was set
        return servers, number(len(servers), 2) + own

    def _changed(self) -> None:
        """Handle a server that has appeared or was lost. Called on the watch's thread."""
        if self._invited:
            self._lost |= self._invited.keys() & self._watch.gone()
        self._bell.ring()

    @property
    def has_lost_invited(self) -> bool:
        """True if an invited server is lost, so the view cannot form."""
        return bool(self._lost)

    def formed(self, view: View) -> None:
        """Record that a view stands; the next one may form at once."""
        self._left_out.used(view.servers)
        rates = view.group.rates[view.n_workers :]
        each = zip(view.servers, rates, view.nics.servers, view.steps, strict=True)
        self._notices.take({one: (nic.out, step) for one, rate, nic, step in each if not rate})
        self._invited = {}
        if self._n_failures > 1:  # a server may be left out: do NOT try it again at once
            self._not_before = _now() + _LONGEST_PAUSE_S
        self._n_failures, self._pause_s = 0, _LEAST_PAUSE_S

    def failed(self, view: int, why: str, unreached: Unreached) -> None:
        """Leave out the servers at fault for a view that did not form, or try again later.

        `why` is empty if only other workers failed.
        """
        invited, self._invited = self._invited, {}
        lost, self._lost = self._lost, set()
        if lost:  # `Notices` logs it
            for one in lost & invited.keys():
                self._left_out.blame(one, invited[one], "was lost as a view formed", _now())
        elif unreached:
            self._blame_unreached(unreached)
        else:
            self._put_off(view, why or "another worker logs the reason")
            self._n_failures += 1

    def _put_off(self, view: int, why: str) -> None:
        """Try again after a pause that doubles; log the first failure of several in a row."""
        _LOG.log(
            logging.WARNING if self._pause_s == _LEAST_PAUSE_S else logging.DEBUG,
            "view %d of the servers did not form: %s; tried again in %.3g s, then less often",
            *(view, why, self._pause_s),
        )
        self._not_before = _now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _blame_unreached(self, unreached: Unreached) -> None:
        ready = self._watch.ready()
        for at, workers in unreached.items():
            address = self._wanted[at]
            who = listed([f"rank {rank} ({self._workers[rank]})" for rank in workers], _MOST_NAMED)
            why = f"cannot reach {who}, or cannot be reached from there"
            self._left_out.blame(address, ready.get(address), why, _now())

    def trouble(self) -> str:
        """Return which servers do not serve, and why."""
        return "; ".join(f"{address} {why}" for address, why in self._trouble().items())

    def _trouble(self) -> dict[Address, str]:
        return {**self._left_out.why(), **self._watch.trouble()}

    def close(self) -> None:
        """Disconnect from the servers; idempotent."""
        self._is_closed = True
        if self._registry is not None:
            self._registry.close()
        self._watch.close()
