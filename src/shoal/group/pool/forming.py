"""Forms views of the servers, on all workers together.

Each worker opens its listeners, and sends its entry of the roster to all others. Rank 0, which has
the servers' entries, sends the roster to the servers, and the servers' part of it to the workers.
So no rendezvous is needed: each rank makes its end of the mesh, the servers dial, and their first
words show that every worker is reached. Finally the workers agree whether the view stands.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError, UsageError
from shoal.group.pool.addresses import Address
from shoal.group.pool.probe import REFERENCE, answer, measure
from shoal.group.pool.view import View, nics_of
from shoal.group.pool.view_mesh import Place, Unmet, enter, read_roster
from shoal.group.work import FOR_EVER_S
from shoal.plan.text import counted
from shoal.rendezvous.packing import Unpacker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.group.pool.control import Bell, Control
    from shoal.group.pool.leader import Leader
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.view_mesh import PoolGroup
    from shoal.rendezvous.roster import Entry

_LOG: Final = logging.getLogger("shoal")
_ENTRY, _FAILURE = b"e", b"f"


class Forming:
    """A worker's part in forming views, one at a time, with the job's key.

    Rings the bell when a formed view ends. Threads: `form` on the pool's; `close` on any.
    """

    def __init__(self, control: Control, rail: Rail, key: bytes, bell: Bell) -> None:
        self._control, self._rail, self._key, self._bell = control, rail, key, bell
        self.leader: Leader | None = None
        self._is_closed = False
        self._is_under_way = False

    def close(self) -> None:
        """End the forming in progress on all workers; no caller waits for it."""
        self._is_closed = True
        if self._is_under_way:
            self._control.abort("it has left")

    def form(self, number: int, begin: Callable[[View], None]) -> None:
        """Form a view, and call `begin` with it once it stands on all workers; else log why not.

        Raises ShoalError if the control group has ended.
        """
        started = time.monotonic()
        self._is_under_way = True
        view = self._form(number)
        if view is not None:
            try:
                begin(view)
            except BaseException:  # this worker or another one leaves
                view.group.close()
                raise
        self._is_under_way = False
        if view is not None and self.leader is not None:
            self.leader.formed(view)
            _LOG.info(
                "%s: view %d: %s from call %d on (%.0f ms)",
                *(self._control, number, counted(len(view.servers), "server"), view.begin),
                1e3 * (time.monotonic() - started),
            )

    def _form(self, number: int) -> View | None:
        place, own = self._open()
        try:
            found = self._exchange(number, own)
            if found is None or place is None:
                return None
            return self._connect(number, *found, place)
        finally:
            if place is not None:
                place.close()

    def _open(self) -> tuple[Place | None, bytes]:
        """Listen for the servers; return the place, and the entry or error for other workers."""
        rank, ranks = self._control.rank, self._control.ranks
        towards = os.environ.get("MASTER_ADDR") or _host_of(ranks[0 if rank else 1].address)
        try:
            place = Place(f"rank {rank}", towards, os.environ)
            return place, _ENTRY + place.entry.encode(rank)
        except ShoalError as error:  # names the rank
            return None, _FAILURE + str(error).encode()
        except OSError as error:
            return None, _FAILURE + f"rank {rank} cannot listen for servers: {error}".encode()

    def _exchange(self, number: int, own: bytes) -> tuple[list[Entry], Sequence[Address]] | None:
        """Return the roster and the servers; None if a worker or a server cannot take part."""
        self._check_open()
        given = self._control.all_bytes(own)
        failures = [each[1:].decode(errors="replace") for each in given if each[:1] == _FAILURE]
        if failures:
            self._failed(number, failures[0], {})
            return None
        workers, named = [each[1:] for each in given], None
        data = b""
        if self.leader is not None:
            named, data = self.leader.invite(number, workers)
        data = self._control.from_lowest(data)
        if not data:
            return None
        unpacker = Unpacker(data)
        size = len(workers) + unpacker.number(2, 1, 0xFFFF)
        roster = read_roster(b"".join([*workers, unpacker.rest()]), size)
        places = (entry.listens_at[0] for entry in roster[len(workers) :])
        return roster, named or [Address(place.address, place.port) for place in places]

    def _connect(
        self, number: int, roster: list[Entry], servers: Sequence[Address], place: Place
    ) -> View | None:
        control, n = self._control, len(servers)
        group, why, unmet, steps = None, "", frozenset[int](), b""
        try:
            where = number, control.rank, control.size, self._key, place.take()
            group = enter(roster, *where, self._is_wanted)
            group.notify(self._bell)
            steps = self._probe(group)
            if isinstance(differ := group.ended(), UsageError):
                why = str(differ)  # NOT after the view stands: the job would end then
        except Unmet as error:
            why, unmet = str(error), error.servers
        except Exception as error:  # noqa: BLE001 - whatever it is, servers are optional
            why = str(error) or repr(error)
        lacks_view = group is None or bool(why)
        try:
            self._check_open()
            own = bytes([lacks_view, *(at in unmet for at in range(n))]) + steps.ljust(n, b"\0")
            results = control.bytes_of_all(own, FOR_EVER_S)
            if group is not None and not any(each[0] for each in results):
                return self._view(number, group, servers, results[0][1 + n :])
        except BaseException:
            if group is not None:
                group.close()
            raise
        if group is not None:
            group.close()
        missed = {at: [r for r, each in enumerate(results) if each[1 + at]] for at in range(n)}
        self._failed(number, why, {at: ranks for at, ranks in missed.items() if ranks})
        return None

    def _probe(self, group: PoolGroup) -> bytes:
        """Measure the servers of unknown rate; rank 0 returns the step of each server."""
        n = self._control.size
        unknown = [rank for rank in range(n, group.size) if not group.rates[rank]]
        if unknown and group.rank == 0:
            found = dict(zip(unknown, measure(group, unknown, self._is_wanted), strict=True))
            return bytes(found.get(rank, 0) for rank in range(n, group.size))
        if unknown and group.rank == REFERENCE:
            answer(group, self._is_wanted)
        return b""

    def _view(
        self, number: int, group: PoolGroup, servers: Sequence[Address], steps: bytes
    ) -> View:
        rates = [rate / self._rail.n_rails for rate in group.rates]
        cluster = self._control.planner.cluster
        nics = nics_of(rates, self._control.size, cluster, steps)
        view = View(number, group, servers, cluster, nics, self._rail)
        view.steps = steps
        return view

    def _failed(self, number: int, why: str, unreached: dict[int, list[int]]) -> None:
        if self.leader is not None:
            self.leader.failed(number, why, unreached)
        elif why and not unreached:  # else rank 0 blames a server, and logs that
            _LOG.info("view %d of the servers did not form: %s", number, why)

    def _is_wanted(self) -> bool:
        return not self._is_closed and (self.leader is None or not self.leader.has_lost_invited)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShoalError("the group was closed")


def _host_of(address: str) -> str | None:
    """Return the host in `10.0.0.2:4711` or `[fd00::2]:4711`."""
    return address.rpartition(":")[0].strip("[]") or None
