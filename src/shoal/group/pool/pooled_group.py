"""The group of all workers of a job that has servers: its large all-reduces go to them too."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal import engine
from shoal.dtypes import Op, item_size, parse_op
from shoal.errors import Closed, ShoalError, UsageError
from shoal.group.buffers import span_of
from shoal.group.calls import ClosedGroup
from shoal.group.group import Group
from shoal.group.pool.addresses import endpoint_from, n_required_from, servers_from
from shoal.group.pool.commands import Follower
from shoal.group.pool.control import Control
from shoal.group.pool.leader import Leader
from shoal.group.pool.pool import Pool
from shoal.group.pool.rail_call import RailCall, RailWork
from shoal.group.pool.rails import RailNumbers, Stage, rail_of
from shoal.group.pool.served_call import ServedCall, ServedWork
from shoal.group.pool.view import Kind
from shoal.group.work import Work
from shoal.rendezvous import job_key
from shoal.shapes import Shape

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.addresses import Address, JobEndpoint
    from shoal.group.pool.rails import Rail, RailPart
    from shoal.group.pool.served_call import NativeError
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

# Below it a call takes what its messages take, of which there are more with servers.
FLOOR_BYTES: Final = 1 << 20

# Two send each other a tensor once as it is.
_LEAST_HOSTS: Final = 3
_FIRST_USE: Final = threading.RLock()  # a signal's handler may close a group


class PooledGroup(Group):
    """`Group`, whose unnamed all-reduces of 1 MiB or more are shared with servers.

    While there are none, they are sharded among the workers: the bits are the same.
    """

    _pool: Pool | None = None
    _is_part = _looks_at_first_use = False
    _rail: Rail
    _coming: RailNumbers

    @property
    def pool(self) -> Pool | None:
        """Its servers; None where there are none to be used."""
        return self._pool

    @staticmethod
    def check(environ: Mapping[str, str]) -> None:
        """What can be wrong before anyone has met.

        Raises:
            UsageError: a variable is, or there is no job key.
        """
        n_required_from(environ)
        if job_key(environ) is None:
            raise UsageError(
                "SHOAL_SERVERS is set and SHOAL_KEY_FILE is not: servers serve whoever proves a "
                "job's key (`openssl rand -hex 32 > job.key; chmod 600 job.key`)"
            )

    def begin(self) -> None:
        """Look for the servers.

        Raises (the group is closed):
            UsageError, TimedOut: see `use_servers`.
        """
        try:
            self.use_servers(os.environ, self.timeout_s)
        except BaseException:
            self.close()
            raise

    def use_servers(self, environ: Mapping[str, str], timeout_s: float) -> None:
        """Look for the servers that the environment names, and wait for those that must be there.

        Raises:
            TimedOut: fewer of them serve after this time than `SHOAL_SERVERS_REQUIRED` says.
        """
        servers, n_required = servers_from(environ), n_required_from(environ)
        key, why = job_key(environ), self._why_not(environ)
        if why or key is None:
            level = logging.WARNING if self.rank == 0 else logging.DEBUG
            _LOG.log(level, "%s: SHOAL_SERVERS is not used: %s", self, why)
            if n_required:
                raise UsageError(f"{self}: SHOAL_SERVERS_REQUIRED={n_required}, but {why}")
            return
        rail = rail_of(self.planner.cluster.hosts, self.rank)
        assert rail is not None  # or it would have been said why not
        self._rail, self._coming = rail, RailNumbers(self._numbers)
        self._pool = pool = self._pool_of(servers, endpoint_from(environ), key)
        weakref.finalize(self, pool.close).atexit = False
        pool.start()
        if n_required:
            pool.await_servers(n_required, timeout_s)

    def subgroup(self, ranks: Sequence[int], name: str, *, wire: str | None = None) -> Self:
        """As `Group.subgroup`; it looks for the servers when it makes its first large call."""
        group = super().subgroup(ranks, name, wire=wire)
        group._is_part = True
        group._look_later()
        return group

    def _look_later(self) -> None:
        # NOT at once: many groups never make one, and each has a view with processes of its own.
        self._looks_at_first_use = self.planner.cluster.n_hosts >= _LEAST_HOSTS

    def _look_at_first_use(self) -> Pool | None:
        """Its servers; all its ranks make this call, so all begin to look."""
        with _FIRST_USE:
            if self._looks_at_first_use:
                try:
                    self.use_servers({**os.environ, "SHOAL_SERVERS_REQUIRED": ""}, 0.0)
                finally:
                    # NOT before: calls of other threads would be made as without servers, and not
                    # match those of other ranks.
                    self._looks_at_first_use = False
            return self._pool

    def _why_not(self, environ: Mapping[str, str]) -> str:
        """Why no servers can be used; the same on every rank."""
        if self.size == 1:
            return "there is one worker, and nothing to reduce"
        hosts = self.planner.cluster.hosts
        if self.planner.cluster.n_hosts == 1:
            return "all workers are on one host"
        if rail_of(hosts, self.rank) is None:
            counts = sorted(Counter(hosts).values())
            return (
                f"hosts have from {counts[0]} to {counts[-1]} workers, and servers serve only jobs "
                "with as many on each: start equally many"
            )
        if self.planner.forced.of("all_reduce"):
            return f"SHOAL_ALGO={environ.get('SHOAL_ALGO')} says how to reduce"
        return ""

    def _pool_of(
        self, servers: tuple[Address, ...], endpoint: JobEndpoint | None, key: bytes
    ) -> Pool:
        native = self._native
        if isinstance(native, ClosedGroup):
            raise Closed(native.why)
        rail = self._rail
        commands = Leader(servers, key, endpoint) if rail.host == 0 else Follower(key)
        # NOT the group itself, which would then live as long as the thread.
        numbers = self._numbers if rail.n_rails == 1 else self._coming
        return Pool(Control.of(self, rail), commands, key, native, numbers, rail)

    def all_reduce(
        self,
        data: Any,
        op: Op | str = Op.SUM,
        *,
        wire: str | None = None,
        priority: int = 0,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """As `Group.all_reduce`."""
        # In this order: who has looked has its servers first, and stops looking then.
        may_share = self._looks_at_first_use or self._pool is not None
        if not may_share or how.get("name") is not None or isinstance(self._native, ClosedGroup):
            return super().all_reduce(data, op, wire=wire, priority=priority, **how)
        span = span_of(data)
        kind = self._kind(span, op, wire)
        pool = self._pool
        if kind is not None and pool is None:
            pool = self._look_at_first_use()
        if kind is None or pool is None:
            return super().all_reduce(span, op, wire=wire, priority=priority, **how)
        if self._rail.n_rails == 1:
            return self._share(pool, kind, span, how)
        pieces = self._rail.pieces(kind.dtype, kind.n_elems)
        if not pieces:
            return super().all_reduce(span, op, wire=wire, priority=priority, **how)
        return self._share_by_rails(pool, kind, pieces, span, how)

    def _kind(self, span: BufferView, op: Op | str, wire: str | None) -> Kind | None:
        """The kind of a call that servers may take part in; None: they may not."""
        n_bytes = span.n_bytes
        if n_bytes < FLOOR_BYTES:
            return None
        found = parse_op(op)
        codec = self._codec("all_reduce", span.dtype, found, n_bytes, wire)
        if not engine.can_fold(span.dtype, found):
            return None
        return Kind(span.dtype, found, span.n_elems, codec)

    def _share(self, pool: Pool, kind: Kind, span: BufferView, how: CallOptions) -> Work | None:
        """Start a call, in two parts where there are servers."""
        timeout_s, subject = self._timeout(how), how.get("subject", 0)
        until = time.monotonic() + timeout_s
        with pool.changed:
            number = self._number(how)
            view = pool.claim(number, until)
            if view is None:
                plan = self._rail.plan(self._sharded(kind))
                is_background = bool(how.get("async_op", False))
                native = self._native.post_in_place(
                    plan, number, span.address, timeout_s, is_background, subject
                )
                call = None
            else:
                call = self._start_parts(pool, view, number, kind, span.address, until, subject)
        if call is None:
            return self._finish(native, span, how)
        return self._finish_shared(call, ServedWork(self, call, span), how)

    def _start_parts(
        self,
        pool: Pool,
        view: View,
        number: int,
        kind: Kind,
        address: int,
        until: float,
        subject: int,
    ) -> ServedCall:
        call = None
        try:
            parts = view.parts(kind, self._sharded(kind))
            call = ServedCall(pool, view, number, parts.shape, address, until, subject)
            if parts.workers is not None:
                timeout_s = max(0.0, until - time.monotonic())
                key = self._rail.key(number, Stage.RAIL)
                call.workers = self._native.post_in_place(
                    parts.workers, key, address, timeout_s, True, subject
                )
            view.post(call, parts)
        except BaseException:  # the others make it, and would wait
            self._native.abort(f"{self}: a call could not be made with its servers")
            if call is not None and call.workers is not None:
                self._context.keep(Work(self, call.workers, None))
            raise
        view.add(call)
        pool.changed.notify_all()  # somebody may wait for this worker to make it
        return call

    def _sharded(self, kind: Kind) -> Shape:
        """The call by the workers alone: whoever reduces, every element is folded alike."""
        return Shape(
            *("all_reduce", "sharded", kind.dtype, kind.op, kind.n_elems),
            *(self._rail.host, len(self._rail.members)),
            hosts=tuple(range(len(self._rail.members))),
            codec=kind.codec,
            rounds_own=kind.is_narrow,
            n_lanes=self.planner.n_lanes("all_reduce", kind.n_elems * item_size(kind.dtype)),
        )

    def _share_by_rails(
        self,
        pool: Pool,
        kind: Kind,
        pieces: Sequence[RailPart],
        span: BufferView,
        how: CallOptions,
    ) -> Work | None:
        """Start a call where several workers share a host; `rails.py` says how it goes on."""
        until, subject = time.monotonic() + self._timeout(how), how.get("subject", 0)
        with pool.changed:
            numbers = self._coming.begin(self._number(how), len(pieces))

        def post(at: int, stage: Stage) -> Work:
            piece, address = pieces[at], span.address + pieces[at].offset
            if stage is Stage.RAIL:
                own = self._rail.own(kind.dtype, piece.n_elems)
                # The average is made where the results are told: the group has more ranks.
                op = Op.SUM if kind.op is Op.AVG else kind.op
                part = kind._replace(op=op, n_elems=own.n_elems, n_pieces=len(pieces))
                start = address + own.offset
                return self._send_along(pool, part, numbers[at], start, until, subject)
            plan = self._rail.local(stage, kind.dtype, kind.op, piece.n_elems)
            key, left_s = self._rail.key(numbers[at], stage), max(0.0, until - time.monotonic())
            return Work(
                self, self._native.post_in_place(plan, key, address, left_s, True, subject), None
            )

        try:
            call = RailCall(len(pieces), post, self._end_by_stage)
        except (ShoalError, MemoryError, RuntimeError):  # nothing has moved, and nothing will
            with pool.changed:
                for number in numbers:
                    self._coming.left(number)
            raise
        return self._finish_shared(call, RailWork(self, call, span), how)

    def _end_by_stage(self, error: NativeError) -> None:
        fault, _, what, _ = error
        why = f"a stage of a call failed: {what}"
        if fault is engine.Fault.MISMATCH:  # all ranks are to hear that their calls differ
            self._native.fail(fault, f"ends the group: {why}")
        else:
            self._native.abort(f"{self}: {why}")

    def _send_along(
        self,
        pool: Pool,
        kind: Kind,
        number: int,
        address: int,
        until: float,
        subject: int,
    ) -> Work:
        """Start the all-reduce of a piece along this worker's rail."""
        with pool.changed:
            view = pool.claim(number, until)
            self._coming.left(number)
            if view is not None:
                call = self._start_parts(pool, view, number, kind, address, until, subject)
                return ServedWork(self, call, None)
            plan, key = self._rail.plan(self._sharded(kind)), self._rail.key(number, Stage.RAIL)
            left_s = max(0.0, until - time.monotonic())
            return Work(
                self, self._native.post_in_place(plan, key, address, left_s, True, subject), None
            )

    def _finish_shared(
        self, call: ServedCall | RailCall, work: Work, how: CallOptions
    ) -> Work | None:
        if how.get("async_op") or how.get("work"):
            self._context.keep(work)
            return work
        try:
            work.wait()
        finally:
            if not call.done():  # interrupted
                self._context.keep(work)
        return None

    def shrink(self, exclude: Sequence[int] = (), *, timeout_s: float | None = None) -> Self:
        """As `Group.shrink`; the new group looks for the servers anew.

        Where it raises, this group keeps its servers.
        """
        group = super().shrink(exclude, timeout_s=timeout_s)
        is_used = self._pool is not None
        self._leave_servers()
        group._is_part = self._is_part
        if self._is_part and not is_used:
            group._look_later()
        else:
            group.use_servers({**os.environ, "SHOAL_SERVERS_REQUIRED": ""}, 0.0)
        return group

    def close(self) -> None:
        """As `Group.close`; leaves the servers first."""
        with _FIRST_USE:  # whoever looks for them has found them, or finds none
            self._looks_at_first_use = False
        self._leave_servers()
        super().close()

    def _leave_servers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter ends: no thread can be joined
                pool.close()
