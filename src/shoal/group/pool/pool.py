"""A job's pool: its servers in views, one after another, and the calls in which they have a part.

Each worker has a thread that carries out the commands of the lowest worker, all in the same order:
form a view, or end one. Commands are messages in the `Control` group. The native core receives them
and rings the thread's bell, so nothing is polled, and a stopped worker misses no command.

Servers are optional, so the thread ends the workers' group for two reasons only:

- a call's deadline has passed (`expire` and `_await_stage`);
- workers have made different calls under one number, or as one call (`_have_differed`).

After any other failure the workers go on without servers. A view that does not form is tried again
later. A thread that cannot go on logs why, and leaves the current view to the native core.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.dtypes import Op
from shoal.engine import Fault
from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.group.pool.control import Bell, What
from shoal.group.pool.ending import NumbersDiffer, finish
from shoal.group.pool.forming import Forming
from shoal.group.pool.leader import Leader
from shoal.group.pool.mend import is_whole_here
from shoal.group.pool.rail_call import RailCall
from shoal.group.pool.rails import RailNumbers, Stage
from shoal.group.pool.served_call import ServedCall, ServedWork
from shoal.group.pool.stages import Stages
from shoal.group.pool.view_mesh import MEETING_S
from shoal.group.work import FOR_EVER_S, Work
from shoal.plan.text import counted
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.engine import Call, NativeGroup
    from shoal.group.numbers import Numbers
    from shoal.group.pool.addresses import Address, JobEndpoint
    from shoal.group.pool.control import Command, Control
    from shoal.group.pool.rails import Posting, Rail
    from shoal.group.pool.served_call import NativeError
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

_LOOK_S: Final = 0.05  # a waiting thread's interval for checking whether the workers' group lives
_LEAVE_S: Final = 0.3  # for the thread to end by itself: it may wait for a stopped worker
_DEADLINES_S: Final = 0.5  # between two looks at the deadlines of calls, when nothing else happens


class Pool:
    """A worker's end of the pool. All calls with a servers' part are posted through it.

    Args:
        control: the group of the pool threads along this worker's rail.
        key: the job's.
        world: the native group of all workers, for the workers' parts of calls.
        numbers: the numbers of calls that may be served, or of their pieces.
        rail: this worker's.

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
        self._named: tuple[Sequence[Address], JobEndpoint | None] = (), None
        self._world = world
        self._numbers, self.rail = numbers, rail
        self.changed = threading.Condition()
        self.stages: Stages[View] = Stages()
        self._views: list[View] = []  # that the workers have not ended yet
        self._held: set[int] = set()  # calls that wait for their stage
        self._waiters: list[tuple[ServedCall, Callable[[], None]]] = []
        self._is_closing = False
        self._bell, self._key = Bell(), key
        self._forming = Forming(control, rail, key, self._bell)
        self._owner = os.getpid()
        self.has_ended = False
        self._thread: threading.Thread | None = None

    def start(self, servers: Sequence[Address], endpoint: JobEndpoint | None) -> None:
        """Begin to use these servers, and servers that register at `endpoint`."""
        self._named = servers, endpoint
        self._thread = start("shoal pool", self._run)

    @property
    def rank(self) -> int:
        """The rank of this worker along its rail."""
        return self.control.rank

    @property
    def view(self) -> View | None:
        """The view that serves new calls."""
        with self.changed:
            return self.stages.last

    def trouble(self) -> str:
        """Return which servers do not serve, and why; empty on ranks other than 0."""
        return "" if self._leader is None else self._leader.trouble()

    def await_servers(self, n: int, timeout_s: float) -> None:
        """Wait until `n` servers serve; TimedOut names each missing server on rank 0, and why."""
        with self.changed:
            most_s = min(timeout_s, FOR_EVER_S)
            self.changed.wait_for(lambda: self.has_ended or self._n_serving() >= n, most_s)
            n_found = self._n_serving()
        if n_found >= n:
            return
        raise TimedOut(
            f"SHOAL_SERVERS_REQUIRED={n}, and {counted(n_found, 'server')} "
            f"{'serves' if n_found == 1 else 'serve'} after {timeout_s:.3g} s: "
            f"{self.trouble() or 'the error of rank 0 has the reason'}"
        )

    def _n_serving(self) -> int:
        return 0 if self.stages.last is None else len(self.stages.last.servers)

    def close(self) -> None:
        """Leave the servers, and end the thread. Calls in flight fail. Idempotent."""
        if os.getpid() != self._owner:
            return  # in a forked child the pool is the parent's
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        if self._leader is not None:
            self._leader.close()
        self._forming.close()
        self._bell.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)
            self.control.abort("it has left")  # ends the thread if it waits for others there
            self._thread.join(2 * MEETING_S)
        self.control.close()

    # Calls.

    def post(self, posting: Posting, is_background: bool = True) -> Call | ServedCall:
        """Start an all-reduce along the rail, in two parts if servers take one.

        Raises TimedOut if the workers did not agree on its servers in time; any other exception has
        ended the workers' group.
        """
        kind, number, address, until, subject = posting
        with self.changed:
            view, key = self._claim(number, until), self.rail.key(number, Stage.RAIL)
            if view is None or not view.takes(number):
                plan, left_s = self.rail.plan(kind.alone(self.rail)), _left_s(until)
                post = self._world.post_in_place
                return post(plan, key, address, left_s, is_background, subject)
            try:
                call, parts = view.call(self, posting)
                if parts.workers is not None:
                    call.workers = self._world.post_in_place(
                        parts.workers, key, address, _left_s(until), True, subject
                    )
                if parts.servers is not None:
                    call.servers = view.group.post(parts.servers, key, address, subject)
                    view.n_shared += call.servers is not None
            except BaseException:  # the other workers make this call, and would wait
                self._world.abort(f"{self.control}: a call could not be made with its servers")
                raise
            self.changed.notify_all()  # the pool's thread may wait for this call to be made
        return call

    def begin_pieces(self, call: int, n_pieces: int) -> range:
        """Return the numbers of a call's pieces, which enter their rails later."""
        assert isinstance(self._numbers, RailNumbers)
        return self._numbers.begin(call, n_pieces)

    def post_pieces(self, posting: Posting, numbers: Sequence[int]) -> RailCall:
        """Start a call in pieces with these numbers; see rail_call.py."""
        try:
            return RailCall(self, posting, numbers)
        except (ShoalError, MemoryError, RuntimeError):  # no piece has moved
            self._pieces_left(numbers)
            raise

    def _pieces_left(self, numbers: Iterable[int]) -> None:
        assert isinstance(self._numbers, RailNumbers)
        with self.changed:
            for number in numbers:
                self._numbers.left(number)

    def post_stage(self, stage: Stage, piece: Posting) -> Work:
        """Start a stage of a piece."""
        kind, number, address, until, subject = piece
        if stage is not Stage.RAIL:
            plan = self.rail.local(stage, kind.dtype, kind.op, kind.n_elems)
            key = self.rail.key(number, stage)
            native = self._world.post_in_place(plan, key, address, _left_s(until), True, subject)
            return Work(self.control, native, [])
        own = self.rail.own(kind.dtype, kind.n_elems)
        # The last stage divides for an average, since the group has more ranks than the rail.
        op = Op.SUM if kind.op is Op.AVG else kind.op
        part = kind._replace(op=op, n_elems=own.n_elems)
        with self.changed:
            call = self.post(piece._replace(kind=part, address=address + own.offset))
            self._pieces_left([number])
        if isinstance(call, ServedCall):
            return ServedWork(self.control, call, [])
        return Work(self.control, call, [])

    def end_by_stage(self, error: NativeError) -> None:
        """End the workers' group after a stage of a call has failed."""
        fault, _, what, _ = error
        why = f"a stage of a call failed: {what}"
        if fault is Fault.MISMATCH:
            # NOT aborted: every rank's error must be that their calls differ.
            self._world.fail(fault, f"ends the group: {why}")
        else:
            self._world.abort(f"{self.control}: {why}")

    def _claim(self, number: int, until: float) -> View | None:
        """Wait for the view of a new call and return it. The caller holds `changed`."""
        self._held.add(number)
        try:
            self._await_stage(number, until)
        finally:
            self._held.discard(number)
        if self.has_ended:
            return None
        return self.stages.claim(number)

    def _await_stage(self, number: int, until: float) -> None:
        def is_free() -> bool:
            view = self.stages.of(number)
            is_settling = view is not None and view.is_settling
            return self.has_ended or not (self.stages.holds(number) or is_settling)

        if not self.changed.wait_for(is_free, _left_s(until)):
            late = f"all_reduce #{number} before the workers agreed on its servers"
            why = f"reached the deadline of {late}"
            self._world.fail(Fault.TIMED_OUT, why)  # the other workers may make this call
            raise TimedOut(f"rank {self.rank} {why}")

    def can_make(self, number: int) -> bool:
        """Return True if this worker can still make the call. The caller holds `changed`."""
        return number in self._held or self._numbers.is_open(number)

    def lowest_open(self) -> int:
        """Return the lowest call that this worker can still make."""
        with self.changed:
            return min([self._numbers.lowest_open(), *self._held])

    def look(self, call: ServedCall) -> None:
        """Wake the pool's thread for a waiting call, or end a mending that cannot succeed."""
        if call.is_mending and self._world.error()[0] is not Fault.NONE:
            self.control.abort("the group of the workers has ended")  # this ends the mending
        self._bell.ring()

    def on_settled(self, call: ServedCall, callback: Callable[[], None]) -> None:
        """Run the callback once the outcome of a call is known, at once if it is already."""
        with self.changed:
            if not self.has_ended and not call.is_settled():
                self._waiters.append((call, callback))
                return
        callback()

    def expire(self, call: ServedCall) -> None:
        """End the group, since the deadline of a call has passed."""
        why = f"reached the deadline of all_reduce #{call.number}, which servers take part in"
        with self.changed:
            call.outcome = (Fault.TIMED_OUT, -1, f"rank {self.rank} {why}", "")
        self._world.fail(Fault.TIMED_OUT, why)
        self.control.abort(why)
        call.view.group.abort(why)
        self.call_back()

    def call_back(self) -> None:
        """Run the callbacks of calls whose outcome is known."""
        with self.changed:
            self.changed.notify_all()
            due = [each for each in self._waiters if self.has_ended or each[0].is_settled()]
            self._waiters = [each for each in self._waiters if each not in due]
        for _, callback in due:
            callback()

    def end_of_world(self) -> NativeError:
        """Return the error that ended the workers' group."""
        for error in (self._world.error(), self.control.native_error()):
            if error[0] is not Fault.NONE:
                return error
        return Fault.CLOSED, -1, "the group was closed", ""

    # The thread.

    def _run(self) -> None:
        try:
            self._bell.open()
            self.control.notify(self._bell)
            self.control.greet()
            if self.rank == 0:
                servers, endpoint = self._named
                self._leader = Leader(self.control, servers, self._key, self._bell, endpoint)
                self._forming.leader = self._leader
            while not self._is_closing:
                self.check_world()
                command = self._next_command()
                if command is not None and command.what is What.FORM:
                    self._forming.form(command.view, self._begin)
                elif command is not None:
                    self._end_view(command)
                self.expire_late()
        except Exception as error:  # noqa: BLE001 - whatever it is, servers are optional
            if self._have_differed(error):
                self._world.fail(Fault.MISMATCH, f"learnt from its servers: {error}")
                self.control.abort(str(error))
            else:
                self._stop_looking(error)
                self._keep_views()
        finally:
            self._end()

    def _next_command(self) -> Command | None:
        """Return the next command; None after a wait, when it is time to check deadlines."""
        if self._leader is None:
            command = self.control.next_command()
        else:
            command = self._leader.decide(self._views, self.stages, self.lowest_open())
            if command is not None:
                self.control.send_command(command)
        if command is None:
            self._bell.wait(_DEADLINES_S if self._leader is None else _LOOK_S)
        return command

    def _stop_looking(self, error: Exception) -> None:
        """Log why the workers cannot change servers any more, and end the control group."""
        if self._is_closing or self._world.error()[0] is not Fault.NONE:
            return  # callers get the world's error
        why = str(error) or repr(error)
        if self.control.ended() is not None:
            _LOG.info("%s: stops looking for servers: %s", self.control, why)
            return
        is_expected = isinstance(error, (ShoalError, OSError, MemoryError))
        _LOG.warning(
            "%s: rank %d stops looking for servers: %s",
            *(self.control, self.rank, why),
            exc_info=None if is_expected else error,
        )
        self.control.abort(f"rank {self.rank} stops looking for servers: {why}")

    def _have_differed(self, error: Exception) -> bool:
        """Return True if the thread ends because workers have made different calls."""
        groups = (self.control, *(view.group for view in self._views))
        have_differed = any(isinstance(group.ended(), UsageError) for group in groups)
        is_mismatch = isinstance(error, UsageError) and have_differed
        return not self._is_closing and (is_mismatch or isinstance(error, NumbersDiffer))

    def expire_late(self) -> None:
        """End the calls whose deadline has passed."""
        now = time.monotonic()
        with self.changed:
            late = [call for view in self._views for call in view.calls if now >= call.expires_at]
        for call in late:
            if not call.is_settled():
                self.expire(call)

    def _keep_views(self) -> None:
        """Keep the current views until a server is lost: their calls may still succeed."""
        with self.changed:
            self.stages.release()  # calls that need the other workers must fail, NOT wait
            for view in self._views:
                view.is_settling = False
            self.changed.notify_all()
        while not self._is_closing and self._world.error()[0] is Fault.NONE:
            if not self._views or any(view.has_ended for view in self._views):
                break
            self.expire_late()
            with self.changed:
                self.changed.wait(_LOOK_S)

    def _end(self) -> None:
        for view in self._views:
            view.group.close()  # NOT aborted: other workers' calls may be about to succeed
            with self.changed:
                calls = list(view.calls)  # another thread may add to them
            for call in calls:
                # A worker that had the complete result may have left.
                if not call.is_whole and is_whole_here(call):
                    call.is_mended = True
        self.control.abort("it has left")  # else threads of other workers may wait for this one
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()  # NOT after the leader: it may take a second to close
        if self._leader is not None:
            self._leader.close()
        self.call_back()

    def _begin(self, view: View | None) -> None:
        """Agree with the other workers on the first call of a stage, and begin it."""
        with self.changed:
            proposal = self.stages.propose()
        number = self.control.most(proposal)
        with self.changed:
            last = self.stages.last
            if last is not None:
                last.end = number
            self.stages.begin(number, view, self.lowest_open())
            if view is not None:
                view.begin = number
                self._views.append(view)
            self.changed.notify_all()

    def _end_view(self, command: Command) -> None:
        """End a view whose calls have all succeeded; after a loss, mend its calls first."""
        view = next(each for each in self._views if each.number == command.view)
        if command.what is What.LOSE:
            view.group.abort("a server of this view is lost")
            if isinstance(differ := view.group.ended(), UsageError):
                raise differ
        if view.end is None:
            self._begin(None)
        finish(self, view, view.end or 0)
        with self.changed:
            self._views.remove(view)
            self.changed.notify_all()
        view.group.close()

    def check_world(self) -> None:
        """Raise the error that has ended the control group or the workers' group."""
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
    return min(max(0.0, until - time.monotonic()), FOR_EVER_S)
