"""The group of all workers of a job that has servers: its large all-reduces go to them too."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal import engine
from shoal.codec import Codec
from shoal.dtypes import Op, item_size, parse_op
from shoal.engine import plan_for
from shoal.errors import UsageError
from shoal.group.buffers import span_of
from shoal.group.calls import ClosedGroup
from shoal.group.group import Group
from shoal.group.pool.addresses import n_required_from, servers_from
from shoal.group.pool.commands import Follower, Leader
from shoal.group.pool.control import Control
from shoal.group.pool.pool import ServerPool
from shoal.group.pool.pool_view import Kind
from shoal.group.pool.pooled_call import PooledCall, PooledWork
from shoal.group.work import Work
from shoal.rendezvous import job_key
from shoal.shapes import Shape

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.pool_view import PoolView

_LOG: Final = logging.getLogger("shoal")

# Below it a call takes what its messages take, of which there are more with servers.
FLOOR_BYTES: Final = 1 << 20


class PooledGroup(Group):
    """`Group`, whose unnamed all-reduces of 1 MiB or more are shared with servers.

    While there are none, they are sharded among the workers: the bits are the same.
    """

    _pool: ServerPool | None = None

    @property
    def pool(self) -> ServerPool | None:
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
        self._pool = pool = self._pool_of(servers, key)
        weakref.finalize(self, pool.close).atexit = False
        pool.start()
        if n_required:
            pool.await_servers(n_required, timeout_s)

    def _why_not(self, environ: Mapping[str, str]) -> str:
        """Why no servers can be used; the same on every rank."""
        if self.size == 1:
            return "there is one worker, and nothing to reduce"
        if self.planner.cluster.n_hosts < self.size:
            return "several workers share a host, which is not served yet: start one on each"
        if self.planner.forced.of("all_reduce"):
            return f"SHOAL_ALGO={environ.get('SHOAL_ALGO')} says how to reduce"
        return ""

    def _pool_of(self, servers: tuple[Address, ...], key: bytes) -> ServerPool:
        native = self._native
        assert isinstance(native, engine.NativeGroup)  # it has just been made
        commands = Leader(servers, key) if self.rank == 0 else Follower(key)
        # NOT the group itself, which would then live as long as the thread.
        cluster = self.planner.cluster
        return ServerPool(Control.of(self), commands, servers, key, native, cluster)

    def all_reduce(
        self,
        data: Any,
        op: Op | str = Op.SUM,
        *,
        wire: str | None = None,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """As `Group.all_reduce`."""
        pool = self._pool
        if pool is None or how.get("name") is not None or isinstance(self._native, ClosedGroup):
            return super().all_reduce(data, op, wire=wire, **how)
        span = span_of(data)
        kind = self._kind(span, op, wire)
        if kind is None:
            return super().all_reduce(span, op, wire=wire, **how)
        return self._share(pool, kind, span, how)

    def _kind(self, span: BufferView, op: Op | str, wire: str | None) -> Kind | None:
        """The kind of a call that servers may take part in; None: they may not."""
        n_bytes = span.n_bytes
        if n_bytes < FLOOR_BYTES:
            return None
        found = parse_op(op)
        codec = self._codec("all_reduce", span.dtype, found, n_bytes, wire)
        if codec is not Codec.IDENTITY or not engine.can_fold(span.dtype, found):
            return None
        return Kind(span.dtype, found, span.n_elems, codec)

    def _share(
        self, pool: ServerPool, kind: Kind, span: BufferView, how: CallOptions
    ) -> Work | None:
        """Start a call, in two parts where there are servers."""
        timeout_s = self._timeout(how)
        until = time.monotonic() + timeout_s
        with pool.changed:
            number, view = pool.claim(until)
            if view is None:
                key = next(self._next_key)
                plan = plan_for(self._sharded(kind))
                native = self._native.post_in_place(
                    plan, key, span.address, timeout_s, bool(how.get("async_op", False))
                )
                call = None
            else:
                call = self._start_parts(pool, view, number, kind, span, until)
        if call is None:
            return self._finish(native, span, how)
        return self._finish_shared(call, span, how)

    def _start_parts(
        self,
        pool: ServerPool,
        view: PoolView,
        number: int,
        kind: Kind,
        span: BufferView,
        until: float,
    ) -> PooledCall:
        address = span.address
        parts = view.parts(kind, self._sharded(kind))
        call = PooledCall(pool, view, number, parts.shape, address, until)
        if parts.workers is not None:
            timeout_s = max(0.0, until - time.monotonic())
            key = next(self._next_key)
            call.workers = self._native.post_in_place(parts.workers, key, address, timeout_s, True)
        try:
            view.post(call, parts)
        except BaseException:
            self._native.abort(f"{self}: a call could not be made with its servers")
            if call.workers is not None:
                self._context.keep(Work(self, call.workers, span))
            raise
        view.add(call)
        pool.changed.notify_all()  # somebody may wait for this worker to make it
        return call

    def _sharded(self, kind: Kind) -> Shape:
        """The call by the workers alone: whoever reduces, every element is folded alike."""
        return Shape(
            *("all_reduce", "sharded", kind.dtype, kind.op, kind.n_elems, self.rank, self.size),
            hosts=self.planner.cluster.hosts,
            codec=kind.codec,
            n_stripes=self.planner.n_stripes("all_reduce", kind.n_elems * item_size(kind.dtype)),
        )

    def _finish_shared(self, call: PooledCall, span: BufferView, how: CallOptions) -> Work | None:
        work = PooledWork(self, call, span)
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
        """As `Group.shrink`; the new group looks for the servers anew."""
        self._leave_servers()
        group = super().shrink(exclude, timeout_s=timeout_s)
        group.use_servers({**os.environ, "SHOAL_SERVERS_REQUIRED": ""}, 0.0)
        return group

    def close(self) -> None:
        """As `Group.close`; leaves the servers first."""
        self._leave_servers()
        super().close()

    def _leave_servers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter ends: no thread can be joined
                pool.close()
