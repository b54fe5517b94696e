"""A group whose large all-reduces are shared with reduction servers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from shoal import engine
from shoal.dtypes import Op, parse_op
from shoal.errors import TimedOut, UsageError
from shoal.group.buffers import span_of
from shoal.group.calls import ClosedGroup
from shoal.group.group import Group
from shoal.group.pool.addresses import endpoint_from, n_required_from, servers_from
from shoal.group.pool.control import Control
from shoal.group.pool.pool import Pool
from shoal.group.pool.rail_call import RailCall
from shoal.group.pool.rails import Kind, Posting, RailNumbers, rail_of
from shoal.group.pool.served_call import ServedCall, ServedWork
from shoal.rendezvous import job_key

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shoal.codec import Codec
    from shoal.engine import Call
    from shoal.group.buffers import BufferView
    from shoal.group.calls import CallOptions
    from shoal.group.pool.rails import Rail
    from shoal.group.view import View
    from shoal.group.work import Work

_LOG: Final = logging.getLogger("shoal")

# Below this size latency decides, and servers add messages.
FLOOR_BYTES: Final = 1 << 20

# Two hosts send each other the tensor only once, so servers save them nothing.
_LEAST_HOSTS: Final = 3
_FIRST_USE: Final = threading.RLock()  # a signal's handler may close a group


class ServedGroup(Group):
    """A `Group` that shares unnamed all-reduces of 1 MiB or more with servers.

    Without servers the calls are sharded among the workers, with the same bits.
    """

    pool: Pool | None = None  # of its servers; None if it uses none
    _is_part = _looks_at_first_use = False

    @staticmethod
    def check(environ: Mapping[str, str]) -> None:
        """Check the environment before ranks meet; UsageError for a wrong value or no key."""
        n_required_from(environ)
        if job_key(environ) is None:
            raise UsageError(
                "SHOAL_SERVERS is set but SHOAL_KEY_FILE is not: servers serve only jobs that "
                "prove a key (`openssl rand -hex 32 > job.key; chmod 600 job.key`)"
            )

    def begin(self) -> None:
        """Begin to use the servers of the environment.

        If fewer than `SHOAL_SERVERS_REQUIRED` serve within the group's timeout, or the group cannot
        use servers, closes the group and raises TimedOut or UsageError.
        """
        try:
            self._use_servers(n_required_from(os.environ))
        except BaseException:
            self.close()
            raise

    def begin_again(self) -> None:
        """Begin to use the servers without waiting for any."""
        self._use_servers(0)

    def _use_servers(self, n_required: int) -> None:
        rail, key = rail_of(self.planner.cluster.hosts, self.rank), job_key(os.environ)
        why = self._why_not(rail)
        if why or key is None or rail is None:
            level = logging.WARNING if self.rank == 0 else logging.DEBUG
            _LOG.log(level, "%s: SHOAL_SERVERS is not used: %s", self, why)
            if n_required:
                raise UsageError(f"{self}: SHOAL_SERVERS_REQUIRED={n_required}, but {why}")
            return
        if self.rank == 0 and self.planner.cluster.n_hosts < _LEAST_HOSTS:
            _LOG.warning("%s: servers are not used: they save two hosts no traffic", self)
        native = self._check_open()
        # NOT the group itself: it would live as long as the pool's thread.
        numbers = self._numbers if rail.n_rails == 1 else RailNumbers(self._numbers)
        self.pool = pool = Pool(Control.of(self, rail), key, native, numbers, rail)
        weakref.finalize(self, pool.close).atexit = False
        pool.start(servers_from(os.environ), endpoint_from(os.environ))
        if n_required:
            pool.await_servers(n_required, self.timeout_s)

    def subgroup(self, ranks: Sequence[int], name: str, *, wire: str | None = None) -> Self:
        """As `Group.subgroup`; the group begins to use servers at its first large call."""
        group = super().subgroup(ranks, name, wire=wire)
        group._is_part = True
        group._look_later()
        return group

    def _look_later(self) -> None:
        # NOT at once: many groups never make a large call, and each would form a view.
        self._looks_at_first_use = self.planner.cluster.n_hosts >= _LEAST_HOSTS

    def _look_at_first_use(self) -> Pool | None:
        """Begin to use servers at the first large call, which all ranks make; return the pool."""
        with _FIRST_USE:
            if self._looks_at_first_use:
                try:
                    self.begin_again()
                finally:
                    # NOT before: calls of other threads would be made without servers, and not
                    # match the calls of other ranks.
                    self._looks_at_first_use = False
            return self.pool

    def _why_not(self, rail: Rail | None) -> str:
        """Return why the group cannot use servers, the same on every rank; empty: it can."""
        if self.size == 1:
            return "there is one worker, and nothing to reduce"
        hosts = self.planner.cluster.hosts
        if self.planner.cluster.n_hosts == 1:
            return "all workers are on one host"
        if rail is None:
            counts = sorted(Counter(hosts).values())
            return (
                f"hosts have from {counts[0]} to {counts[-1]} workers, and servers serve only jobs "
                "with the same number on each: start the same number on every host"
            )
        if self.planner.forced.of("all_reduce"):
            return f"SHOAL_ALGO={os.environ.get('SHOAL_ALGO')} chooses the algorithm"
        return ""

    def all_reduce(
        self,
        data: Any,
        op: Op | str = Op.SUM,
        *,
        wire: str | Codec | None = None,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """As `Group.all_reduce`."""
        # In this order: `_look_at_first_use` sets the pool first, then the flag.
        may_share = self._looks_at_first_use or self.pool is not None
        if not may_share or how.get("name") is not None or isinstance(self._native, ClosedGroup):
            return super().all_reduce(data, op, wire=wire, **how)
        span, found = span_of(data), parse_op(op)
        is_large = span.n_bytes >= FLOOR_BYTES and engine.can_fold(span.dtype, found)
        pool = (self.pool or self._look_at_first_use()) if is_large else None
        kind = self._kind(pool, span, found, wire, how) if pool is not None else None
        if kind is None or pool is None:
            return super().all_reduce(span, op, wire=wire, **how)
        until, subject = time.monotonic() + self._timeout(how), how.get("subject", 0)
        call: Call | ServedCall | RailCall
        held = self._hold(span)
        try:
            with pool.changed:  # NOT released before `post`: a view might begin with a higher call
                posting = Posting(kind, self._number(how), span.address, until, subject)
                if kind.pieces:
                    numbers = pool.begin_pieces(posting.number, len(kind.pieces))
                else:
                    call = pool.post(posting, bool(how.get("async_op", False)))
            if kind.pieces:
                call = pool.post_pieces(posting, numbers)
        except (TimedOut, UsageError):  # nothing was posted
            self._context.held.pop(id(held), None)
            raise
        return self._finish(cast("Call", call), None, held, how)

    def _work_of(self, call: Call, held: list[object]) -> Work:
        found = cast("Call | ServedCall | RailCall", call)
        if isinstance(found, (ServedCall, RailCall)):
            return ServedWork(self, found, held)
        return super()._work_of(call, held)

    def _kind(
        self, pool: Pool, span: BufferView, op: Op, wire: str | Codec | None, how: CallOptions
    ) -> Kind | None:
        """Return the kind of a call; None if it cannot be cut over the rails."""
        codec = self._codec("all_reduce", span.dtype, op, span.n_bytes, wire)
        if wire is None and not how.get("subject"):
            self._check_wire(codec)
        n_lanes = self.planner.n_lanes("all_reduce", span.n_bytes)
        kind = Kind(span.dtype, op, span.n_elems, codec, n_lanes)
        if pool.rail.n_rails == 1:
            return kind
        pieces = pool.rail.pieces(span.dtype, span.n_elems)
        return kind._replace(pieces=tuple(pieces)) if pieces else None

    def _go_on_in(self, view: View) -> Self:
        """As `Members._go_on_in`; the next view begins to use the servers again."""
        group = super()._go_on_in(view)
        self._leave_servers()
        group._is_part = self._is_part
        if self._is_part:
            group._look_later()
        else:
            group.begin_again()
        return group

    def close(self) -> None:
        """As `Group.close`, after leaving the servers."""
        with _FIRST_USE:  # after a first use in progress; later ones find no servers
            self._looks_at_first_use = False
        self._leave_servers()
        super().close()

    def _leave_servers(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            # At the interpreter's end no thread can be joined.
            with contextlib.suppress(RuntimeError):
                pool.close()
