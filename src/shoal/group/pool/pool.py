"""The pool of a job: its servers in views, one after another, and the calls that they share in.

Each worker has a thread that carries out the commands of the lowest worker, all in the same order:
form a view, end one. Commands are messages in the `Control` group. The native core takes them in,
and rings the thread's bell; so nothing is polled, and a worker that is held misses none.

Servers are optional, so the thread ends the workers' group for two reasons only:

- a call's deadline has passed (`expire` and `_await_stage`);
- workers have made different calls under one number, or as one call (`_have_differed`).

Every other failure means "no servers for now". A view that does not form is tried again later. A
thread that cannot go on logs why, and leaves the current view to the native core.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.dtypes import Op
from shoal.engine import Fault
from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.group.pool.addresses import parse_address
from shoal.group.pool.bell import Bell
from shoal.group.pool.commands import MEETING_S, Form
from shoal.group.pool.leader import Leader
from shoal.group.pool.meeting import Misplaced, Unmet, ViewMeeting
from shoal.group.pool.mend import is_whole_here, mend
from shoal.group.pool.probe import REFERENCE, answer, measure
from shoal.group.pool.rail_call import RailCall
from shoal.group.pool.rails import RailNumbers, Stage
from shoal.group.pool.served_call import ServedCall, ServedWork
from shoal.group.pool.settling import NumbersDiffer, made_by_all, settle
from shoal.group.pool.stages import Stages
from shoal.group.pool.view import View, nics_of
from shoal.group.work import FOR_EVER_S, Work
from shoal.plan.text import counted
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.engine import Call, NativeGroup
    from shoal.group.numbers import Numbers
    from shoal.group.pool.addresses import Address, JobEndpoint
    from shoal.group.pool.commands import Command, End
    from shoal.group.pool.control import Control
    from shoal.group.pool.kinds import Kind
    from shoal.group.pool.meeting import PoolGroup
    from shoal.group.pool.rails import Rail
    from shoal.group.pool.served_call import NativeError

_LOG: Final = logging.getLogger("shoal")

_LOOK_S: Final = 0.05  # between two looks of a waiting thread whether the workers' group has ended
_DEADLINES_S: Final = 0.5  # between two looks at the deadlines of calls, where nothing else happens


class Pool:
    """A worker's end of the pool. It alone posts calls that servers may take part in.

    Args:
        control: the group of the pool threads along this worker's rail.
        key: the job's.
        world: the native group of all workers, where their parts of calls are posted.
        numbers: the numbers of calls that may be served, or of their pieces.

    Threads: one, a daemon, from `start` to `close`; all methods may be called from any.
    """

    def __init__(
        self,
        control: Control,
        key: bytes,
        world: NativeGroup,
        numbers: Numbers | RailNumbers,
        rail: Rail,
    ) -> None:
        self.control = control
        self._leader: Leader | None = None
        self._world, self._cluster = world, control.planner.cluster
        self._numbers, self._rail = numbers, rail
        self.changed = threading.Condition()
        self.stages: Stages[View] = Stages()
        self._views: list[View] = []  # that have not been ended by all
        self._held: set[int] = set()  # calls that wait until it is known who serves them
        self._waiters: list[tuple[ServedCall, Callable[[], None]]] = []
        self._is_closing = False
        self._is_forming = False  # no caller waits for a view that forms: `close` may abort it
        self._bell, self._key = Bell(), key
        self._meeting = ViewMeeting(key)
        self._owner = os.getpid()
        self.has_ended = False
        self._thread: threading.Thread | None = None

    def lead(self, servers: Sequence[Address], endpoint: JobEndpoint | None) -> None:
        """Become the lowest worker's end, which decides; call it before `start`.

        Args:
            endpoint: where further servers may leave their addresses.
        """
        self._leader = Leader(servers, self._key, self._bell, endpoint)

    def start(self) -> None:
        """Begin to use servers."""
        self._thread = start("shoal pool", self._run)

    @property
    def rank(self) -> int:
        """The rank of this worker along its rail."""
        return self.control.rank

    @property
    def view(self) -> View | None:
        """The view of the calls that are made now."""
        with self.changed:
            return self.stages.last

    def trouble(self) -> str:
        """Return which servers do not serve, and why; empty on ranks other than 0."""
        return "" if self._leader is None else self._leader.trouble()

    def await_servers(self, n: int, timeout_s: float) -> None:
        """Wait until `n` servers serve.

        Raises:
            TimedOut: fewer do; on rank 0 it names each missing server, with the reason.
        """
        until = time.monotonic() + timeout_s
        with self.changed:
            while True:
                view = self.stages.last
                if view is not None and len(view.servers) >= n:
                    return
                left_s = until - time.monotonic()
                if left_s <= 0 or self.has_ended:
                    break
                self.changed.wait(min(left_s, _LOOK_S))
        n_found = 0 if view is None else len(view.servers)
        raise TimedOut(
            f"SHOAL_SERVERS_REQUIRED={n}, and {counted(n_found, 'server')} "
            f"{'serves' if n_found == 1 else 'serve'} after {timeout_s:.3g} s: "
            f"{self.trouble() or 'the error of rank 0 says why'}"
        )

    def close(self) -> None:
        """Leave the servers, and end the thread. Calls in flight fail. Idempotent."""
        if os.getpid() != self._owner:
            return  # after fork: all of it is the parent's
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        if self._leader is not None:
            self._leader.close()
        self._meeting.close()
        self._bell.ring()
        if self._is_forming:
            self.control.abort("it has left")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * MEETING_S)
        self.control.close()  # which ends the thread, should it still wait for others there

    # Calls.

    def post(
        self,
        kind: Kind,
        number: int,
        address: int,
        until: float,
        subject: int,
        is_background: bool = True,
    ) -> Call | ServedCall:
        """Start an all-reduce along the rail, in two parts if servers share in it.

        Raises:
            TimedOut: the time is up before the workers agreed on its servers.
            Exception: the group of the workers has ended, since others make this call.
        """
        with self.changed:
            view, key = self._claim(number, until), self._rail.key(number, Stage.RAIL)
            if view is None or not view.takes(number):
                plan, left_s = self._rail.plan(kind.alone(self._rail)), _left_s(until)
                post = self._world.post_in_place
                return post(plan, key, address, left_s, is_background, subject)
            try:
                call, parts = view.call(self, kind, number, address, until, subject)
                if parts.workers is not None:
                    call.workers = self._world.post_in_place(
                        parts.workers, key, address, _left_s(until), True, subject
                    )
                if parts.servers is not None:
                    call.servers = view.group.post(parts.servers, key, address, subject)
                    view.n_shared += call.servers is not None
            except BaseException:  # the other workers make it, and would wait
                self._world.abort(f"{self.control}: a call could not be made with its servers")
                raise
            self.changed.notify_all()  # another thread may wait for this worker to make it
        return call

    def begin_pieces(self, call: int, n_pieces: int) -> range:
        """Return the numbers of a call's pieces, which leave along their rails later."""
        assert isinstance(self._numbers, RailNumbers)
        return self._numbers.begin(call, n_pieces)

    def post_pieces(
        self,
        kind: Kind,
        numbers: Sequence[int],
        address: int,
        until: float,
        subject: int,
    ) -> RailCall:
        """Start a call where several workers share a host; `rails.py` says how it goes on."""
        try:
            return RailCall(self, kind, numbers, address, until, subject)
        except (ShoalError, MemoryError, RuntimeError):  # nothing has moved, and nothing will
            self._pieces_left(numbers)
            raise

    def _pieces_left(self, numbers: Iterable[int]) -> None:
        assert isinstance(self._numbers, RailNumbers)
        with self.changed:
            for number in numbers:
                self._numbers.left(number)

    def post_stage(
        self, stage: Stage, kind: Kind, number: int, address: int, until: float, subject: int
    ) -> Work:
        """Start a stage of a piece, which is a kind of call with an address of its own."""
        if stage is not Stage.RAIL:
            plan = self._rail.local(stage, kind.dtype, kind.op, kind.n_elems)
            key = self._rail.key(number, stage)
            native = self._world.post_in_place(plan, key, address, _left_s(until), True, subject)
            return Work(self.control, native, None)
        own = self._rail.own(kind.dtype, kind.n_elems)
        # The average is made in the last stage: the group has more ranks than the rail.
        op = Op.SUM if kind.op is Op.AVG else kind.op
        part = kind._replace(op=op, n_elems=own.n_elems)
        with self.changed:
            call = self.post(part, number, address + own.offset, until, subject)
            self._pieces_left([number])
        if isinstance(call, ServedCall):
            return ServedWork(self.control, call, None)
        return Work(self.control, call, None)

    def end_by_stage(self, error: NativeError) -> None:
        """End the group of the workers, since a stage of a call has failed."""
        fault, _, what, _ = error
        why = f"a stage of a call failed: {what}"
        if fault is Fault.MISMATCH:  # NOT aborted: all ranks must learn that their calls differ
            self._world.fail(fault, f"ends the group: {why}")
        else:
            self._world.abort(f"{self.control}: {why}")

    def _claim(self, number: int, until: float) -> View | None:
        """Return the view that serves a call which is made now. Holds `changed`."""
        self._held.add(number)
        try:
            self._await_stage(number, until)
        finally:
            self._held.discard(number)
        if self.has_ended:
            return None
        return self.stages.claim(number)

    def _await_stage(self, number: int, until: float) -> None:
        while not self.has_ended:
            view = self.stages.of(number)
            if not self.stages.holds(number) and not (view is not None and view.is_settling):
                return
            left_s = until - time.monotonic()
            if left_s <= 0:
                late = f"all_reduce {number} before the workers agreed on its servers"
                why = f"reached the deadline of {late}"
                self._world.fail(Fault.TIMED_OUT, why)  # the others count it
                raise TimedOut(f"the time was up of {late}")
            self.changed.wait(min(left_s, _LOOK_S))

    def _may_come(self, number: int) -> bool:
        """Whether this worker may yet make this call. Holds `changed`."""
        return number in self._held or self._numbers.is_open(number)

    def _lowest_open(self) -> int:
        """The lowest call that this worker may yet make."""
        with self.changed:
            return min([self._numbers.lowest_open(), *self._held])

    def look(self, call: ServedCall) -> None:
        """Called while a call waits for the pool's thread: wake it, or end what it waits in."""
        if call.is_mending and self._world.error()[0] is not Fault.NONE:
            self.control.abort("the group of the workers has ended")  # and what mends with it
        self._bell.ring()

    def on_settled(self, call: ServedCall, callback: Callable[[], None]) -> None:
        """Call back once its outcome is known, at once if it is."""
        with self.changed:
            if not self.has_ended and not call.is_settled():
                self._waiters.append((call, callback))
                return
        callback()

    def expire(self, call: ServedCall) -> None:
        """Its deadline has passed: the group ends, as for every call that is late."""
        why = f"reached the deadline of all_reduce {call.number}, which servers have a part in"
        with self.changed:
            call.outcome = (Fault.TIMED_OUT, -1, f"rank {self.rank} {why}", "")
        self._world.fail(Fault.TIMED_OUT, why)
        self.control.abort(why)
        call.view.abort(why)
        self._call_back()

    def _call_back(self) -> None:
        """Tell who waits for what is known now."""
        with self.changed:
            self.changed.notify_all()
            due = [each for each in self._waiters if self.has_ended or each[0].is_settled()]
            self._waiters = [each for each in self._waiters if each not in due]
        for _, callback in due:
            callback()

    def end_of_world(self) -> NativeError:
        """Return why the group of the workers has ended."""
        for error in (self._world.error(), self.control.native_error()):
            if error[0] is not Fault.NONE:
                return error
        return Fault.CLOSED, -1, "the group was closed", ""

    # The thread.

    def _run(self) -> None:
        try:
            self._bell.open()
            self.control.notify(self._bell)
            if self._leader is not None:
                self._leader.begin(self.control)
            while not self._is_closing:
                self._check_world()
                command = self._next_command()
                if isinstance(command, Form):
                    self._form(command)
                elif command is not None:
                    self._end_view(command)
                self._expire_late()
        except Exception as error:  # noqa: BLE001 - whatever it is, servers are optional
            if self._have_differed(error):
                self._world.fail(Fault.MISMATCH, f"found out from its servers: {error}")
                self.control.abort(str(error))
            else:
                self._do_without(error)
                self._outlive()
        finally:
            self._end()

    def _next_command(self) -> Command | None:
        """Return the next command; None if there was none by the time to look at deadlines."""
        if self._leader is None:
            command = self.control.next_command()
        else:
            command = self._leader.decide(self._views, self.stages, self._lowest_open())
            if command is not None:
                self.control.send_command(command)
        if command is None:
            self._bell.wait(_DEADLINES_S if self._leader is None else _LOOK_S)
        return command

    def _do_without(self, error: Exception) -> None:
        """The workers cannot agree on other servers any more."""
        if self._is_closing or self._world.error()[0] is not Fault.NONE:
            return  # everybody knows
        why = str(error) or repr(error)
        if self.control.ended() is not None:
            _LOG.info("%s: servers are not looked for any more: %s", self.control, why)
            return
        is_foreseen = isinstance(error, (ShoalError, OSError, MemoryError))
        _LOG.warning(
            "%s: rank %d ends the search for servers: %s",
            *(self.control, self.rank, why),
            exc_info=None if is_foreseen else error,
        )
        self.control.abort(f"rank {self.rank} ends the search for servers: {why}")

    def _have_differed(self, error: Exception) -> bool:
        """True if workers have called different things, and the thread ends by that."""
        groups = (self.control, *(view.group for view in self._views))
        have_differed = any(isinstance(group.ended(), UsageError) for group in groups)
        is_mismatch = isinstance(error, UsageError) and have_differed
        return not self._is_closing and (is_mismatch or isinstance(error, NumbersDiffer))

    def _expire_late(self) -> None:
        now = time.monotonic()
        with self.changed:
            late = [call for view in self._views for call in view.calls if now >= call.expires_at]
        for call in late:
            if not call.is_settled():
                self.expire(call)

    def _outlive(self) -> None:
        """Nobody changes servers any more: what they have a part in may still end well here."""
        with self.changed:
            self.stages.release()  # what needs them as well is to fail, and not to wait
            for view in self._views:
                view.is_settling = False
            self.changed.notify_all()
        while not self._is_closing and self._world.error()[0] is Fault.NONE:
            if not self._views or any(view.has_ended for view in self._views):
                break
            self._expire_late()
            with self.changed:
                self.changed.wait(_LOOK_S)

    def _end(self) -> None:
        for view in self._views:
            view.group.close()  # NOT aborted: others may be about to end their calls well
            with self.changed:
                calls = list(view.calls)  # others may be about to add some
            for call in calls:
                # Whoever had it whole may have left, and nobody is there to tell us.
                if not call.is_whole and is_whole_here(call):
                    call.is_mended = True
        if self._is_closing:  # or who wants to change servers would wait for this rank for ever
            self.control.abort("it has left")
        with self.changed:
            self.has_ended = True
        if self._leader is not None:
            self._leader.close()
        self._call_back()

    def _form(self, command: Form) -> None:
        """Meet the servers, and use them from a call on that all workers agree on."""
        started = time.monotonic()
        self._is_forming = True
        where = "" if self._leader is None else self._leader.invite(command, self.control.size)
        named, host, port = self.control.tell(where).split(" ")
        servers = [parse_address(one, "a server") for one in named.split(",")]
        group, why, misplaced, unmet = None, "", -1, frozenset[int]()
        n, steps = len(servers), b""
        n_workers = self.control.size
        try:
            group = self._meeting.meet(
                *(host, int(port), command.view, self.rank, n_workers + n, n_workers)
            )
            group.notify(self._bell)
            steps = self._probe(group)
            if isinstance(differ := group.ended(), UsageError):
                why = str(differ)  # NOT a view that stands: the end of one by this ends the job
        except Misplaced as error:
            why, misplaced = str(error), error.server
        except Unmet as error:
            why, unmet = str(error), error.servers
        except Exception as error:  # noqa: BLE001 - whatever it is, servers are optional
            why = str(error) or repr(error)
        is_missing = group is None or bool(why)
        own = bytes([is_missing, *(at in unmet for at in range(n))]) + steps.ljust(n, b"\0")
        told = self._tell(own, group)
        if any(lacks_view for lacks_view, *_ in told):
            if group is not None:
                group.close()
            unheard = {
                at: [rank for rank, one in enumerate(told) if one[1 + at]] for at in range(n)
            }
            known = {at: workers for at, workers in unheard.items() if workers}
            if self._leader is not None:
                self._leader.failed(command, why, misplaced, known)
            elif why and not known:  # else rank 0 blames a server, and logs that
                _LOG.info("view %d of the servers did not form: %s", command.view, why)
            return
        assert group is not None
        steps = told[0][1 + n :]
        view = self._view(command, group, servers, steps)
        self._begin(view)
        if self._leader is not None:
            self._leader.formed(view, steps)
            _LOG.info(
                "%s: view %d: %s from call %d on (%.0f ms)",
                *(self.control, view.number, counted(len(view.servers), "server"), view.begin),
                1e3 * (time.monotonic() - started),
            )

    def _probe(self, group: PoolGroup) -> bytes:
        """Measure the servers of unknown rate: rank 0 decides what they are taken for."""
        n = self.control.size
        unknown = [rank for rank in range(n, group.size) if not group.rates[rank]]
        is_wanted = lambda: not self._is_closing  # noqa: E731
        if unknown and self.rank == 0:
            found = dict(zip(unknown, measure(group, unknown, is_wanted), strict=True))
            return bytes(found.get(rank, 0) for rank in range(n, group.size))
        if unknown and self.rank == REFERENCE:
            answer(group, is_wanted)
        return b""

    def _tell(self, own: bytes, group: PoolGroup | None) -> list[bytes]:
        """By worker, how the forming of a view has gone."""
        try:
            self._check_open()
            told = self.control.bytes_of_all(own, FOR_EVER_S)
        except BaseException:
            if group is not None:
                group.close()
            raise
        self._is_forming = False
        return told

    def _view(
        self, command: Form, group: PoolGroup, servers: Sequence[Address], steps: bytes
    ) -> View:
        try:
            rates = [rate / self._rail.n_rails for rate in group.rates]
            nics = nics_of(rates, self.control.size, self._cluster, steps)
            return View(
                *(command.view, group, servers, self._cluster, nics, self._rail),
                self._leader,
            )
        except BaseException:
            group.close()
            raise

    def _begin(self, view: View | None) -> None:
        """Agree on the call with which a stage begins, and begin it."""
        with self.changed:
            proposal = self.stages.propose()
        number = self.control.most(proposal)
        with self.changed:
            last = self.stages.last
            if last is not None:
                last.end = number
            self.stages.begin(number, view, self._lowest_open())
            if view is not None:
                view.begin = number
                self._views.append(view)
            self.changed.notify_all()

    def _end_view(self, command: End) -> None:
        """Let a view go: all its calls have ended well, or a server is lost and they are mended."""
        view = next(each for each in self._views if each.number == command.view)
        if command.is_lost:
            view.abort("a server of this view is lost")
            if isinstance(differ := view.group.ended(), UsageError):
                raise differ
        if view.end is None:
            self._begin(None)
        end = view.end or 0
        self._finish(view, end)
        with self.changed:
            self._views.remove(view)
            self.changed.notify_all()
        view.group.close()

    def _finish(self, view: View, end: int) -> None:
        """Complete the calls that its servers left, on all workers together.

        What nobody has made yet is not the view's any more: servers have no part in it.
        """
        started = time.monotonic()
        with self.changed:
            view.is_settling = True
            calls = list(view.calls)
        for call in calls:
            self._await(call)
        begin = min([self._lowest_open(), *(call.number for call in calls if not call.is_whole)])
        begin = max(view.begin, -self.control.most(-begin))
        told = self._standings(view, range(begin, end))
        settled = settle(begin, told)
        with self.changed:
            for call in calls:
                if call.number in settled.whole:
                    call.is_mended = True
            view.left, view.is_settling = frozenset(settled.left), False
        self._call_back()
        self._mend_all(view, settled.left)
        n_open = len(settled.whole) + len(settled.left)
        if n_open and self.rank == 0:
            took_ms = 1e3 * (time.monotonic() - started)
            _LOG.warning(
                "%s: a server of view %d was lost; %s in flight %s completed without it in %.0f ms",
                *(self.control, view.number, counted(n_open, "call")),
                *("was" if n_open == 1 else "were", took_ms),
            )

    def _await(self, call: ServedCall) -> None:
        """Wait until the native core has let go of it; the world's end sees to that too."""
        while call.servers is not None and not call.servers.wait(_LOOK_S):
            self._check_world()

    def _standings(self, view: View, numbers: Collection[int]) -> list[bytes]:
        """By worker, how these calls stand there."""
        with self.changed:
            own = bytes(view.standings(numbers, self._may_come))
        return self.control.bytes_of_all(own, FOR_EVER_S) if own else [b""] * self.control.size

    def _mend_all(self, view: View, left: Sequence[int]) -> None:
        """Mend these calls, each once all workers have made it: they may do so in any order."""
        while left:
            told = self._standings(view, left)
            made = made_by_all(left, told)
            for number in made:
                self._mend(view, number)
            left = [number for number in left if number not in made]
            self._expire_late()
            self._check_world()
            with self.changed:
                if left and any(map(self._may_come, left)):
                    self.changed.wait(_LOOK_S)

    def _mend(self, view: View, number: int) -> None:
        with self.changed:
            call = next((call for call in view.calls if call.number == number), None)
            if call is None or call.outcome is not None:  # its caller has its memory back
                raise ShoalError("the group of the workers has ended")
            call.is_mending = True
        has_all = False
        try:
            mend(self.control, call)
            has_all = True
            self.control.most(0)  # NOT before all have: whoever's call has ended may leave
        finally:
            with self.changed:
                call.is_mending, call.is_mended = False, has_all
        self._call_back()

    def _check_world(self) -> None:
        """Raise what has ended it."""
        error = self.control.ended()
        if error is not None:
            raise error
        if self._world.error()[0] is not Fault.NONE:
            raise ShoalError("the group of the workers has ended")
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closing:
            raise ShoalError("the group was closed")


def _left_s(until: float) -> float:
    return max(0.0, until - time.monotonic())
