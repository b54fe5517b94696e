"""Groups of ranks and the collectives they do.

`form` meets the other ranks and makes the world group; `Group.subgroup` carves smaller ones out
of it, locally and for free.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict

from shoal import engine
from shoal.buffers import Span, span_of
from shoal.dtypes import Op, parse_op
from shoal.engine import Seat, Shape, plan_for
from shoal.errors import Closed, ShoalError, UsageError
from shoal.plan import Topology, choose
from shoal.plan.choose import forced_algorithm
from shoal.rendezvous import Membership, Store, join
from shoal.work import COMPLETIONS, Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOG: Final = logging.getLogger("shoal")

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_STAGING_BYTES: Final = 50 << 20
# How long a waiting caller polls before it sleeps. Longer burns CPU that the other ranks of a busy
# host could use, shorter adds a wake-up to small messages.
DEFAULT_SPIN_US: Final = 50.0


# How long the program's end waits for threads to notice that their calls have ended.
_LAST_WAIT_S: Final = 2.0


class World:
    """One epoch: the links to all peers, and what its groups share.

    Ends once: when it is closed, when nobody holds a group of it any more, or with the program.
    """

    def __init__(self, mesh: engine.Mesh, rank: int, names: Sequence[Seat]) -> None:
        self._mesh: engine.Mesh | None = mesh
        self.rank = rank
        self.names = names
        # The engine writes to the buffers of these until they are done, whoever drops them.
        self.live: deque[Work] = deque()
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._n_made: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self._end = weakref.finalize(self, mesh.close)
        self._end.atexit = False  # `_end_all` has more to do
        _WORLDS.add(self)

    def enrol(self, group: Group, name: str, members: Sequence[int]) -> engine.NativeGroup:
        """The native group of a new one. All members get the same id for it, and never again."""
        who = (name, *map(str, members))
        self._n_made[who] += 1
        self.groups.add(group)
        if self._mesh is None:
            raise Closed(f"group {name!r} cannot be made: its world was closed")
        return self._mesh.group(_hash(*who, self._n_made[who]), members)

    def close(self) -> None:
        """Say goodbye to all peers and end the links. Idempotent."""
        # NOT `self._end()`: finalizers do nothing once the program is ending.
        self._end.detach()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def forsake(self) -> None:
        """After fork, in the child: the links are the parent's, and nothing is said on them."""
        self._end.detach()
        for group in list(self.groups):
            group.forsake()


_WORLDS: Final[weakref.WeakSet[World]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all worlds while the interpreter is whole, and let all threads out of native code."""
    for world in list(_WORLDS):
        world.close()
    COMPLETIONS.finish()
    deadline = time.monotonic() + _LAST_WAIT_S
    pause = threading.Event()  # waited on only for its timeout, which lets the others run
    while engine.n_waiting() and time.monotonic() < deadline:
        pause.wait(0.001)


def _after_fork_in_child() -> None:
    engine.after_fork_in_child()
    COMPLETIONS.forget_thread()
    for world in list(_WORLDS):
        world.forsake()
    _WORLDS.clear()


os.register_at_fork(
    before=engine.before_fork,
    after_in_parent=engine.after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def form(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    name: str = "world",
) -> Group:
    """Meet all ranks through `store` and return the group of all of them.

    Args:
        store: reached by all ranks; only needed until this returns.
        timeout_s: seconds for the meeting, and for every later call that names none of its own.

    Raises (nothing is left open):
        UsageError: a variable is wrong, keys differ, no descriptors are left.
        TimedOut: names the ranks that did not come.
        ShoalError: no shared memory is left.
    """
    staging_bytes = _integer("SHOAL_STAGING_BYTES", DEFAULT_STAGING_BYTES, 8 << 20)
    spin_us = _integer("SHOAL_SPIN_US", int(DEFAULT_SPIN_US), 0)
    forced_algorithm()  # a wrong name is refused before anyone is kept waiting
    arenas: list[engine.Arena] = []

    def local_fds(n_local: int) -> tuple[int, int]:
        arenas.append(engine.Arena.create(n_local))
        return arenas[-1].memory_fd, arenas[-1].event_fd

    try:
        membership = join(store, rank, size, timeout_s=timeout_s, local_fds=local_fds)
        if not arenas:
            local_fds(1)  # alone: nobody to pass them to
        seats = _seats(membership)
        mesh = engine.Mesh.create(
            rank=rank,
            names=[f"rank {other} ({seat})" for other, seat in enumerate(seats)],
            epoch=membership.epoch,
            arena=arenas[-1],
            peers=[(peer.rank, peer.socket_fd, *_two(peer.fds)) for peer in membership.take()],
            staging_bytes=staging_bytes,
            spin_us=float(spin_us),
        )
    except ShoalError:
        raise
    except (MemoryError, RuntimeError) as error:  # the native core's two at set-up
        raise ShoalError(f"rank {rank} cannot join: {error}") from error
    finally:
        arenas.clear()  # NOT left to whoever keeps the error, and with it this frame
    return Group(World(mesh, rank, seats), list(range(size)), name, timeout_s, owns_world=True)


def _seats(membership: Membership) -> list[Seat]:
    """Where each rank is."""
    seats = {
        peer.rank: Seat(peer.host_label, peer.address, peer.host_id) for peer in membership.peers
    }
    seats[membership.rank] = Seat(socket.gethostname(), "", membership.host_id)
    return [seats[rank] for rank in range(membership.size)]


def _two(fds: tuple[int, ...]) -> tuple[int, int]:
    """A host-mate's arena and eventfd; -1 for ranks of other hosts."""
    return (fds[0], fds[1]) if fds else (-1, -1)


def _integer(name: str, default: int, least: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UsageError(f"{name}={text!r} is no integer of at least {least}; default {default}")
    return int(text)


# Three kinds of calls share the 64-bit key space of a group.
_NAMED: Final = 1 << 62
_POINT: Final = 1 << 63


def _hash(*parts: object) -> int:
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class _NoGroup:
    """In the place of a native group that is gone: refuses every call."""

    def __init__(self, why: str) -> None:
        self.why = why

    def post(self, *_call: object) -> NoReturn:
        raise Closed(self.why)

    post_in_place = post

    def abort(self, _why: str) -> None:
        """Nothing is left to end."""

    def drop(self) -> None:
        """It is gone already."""


class How(TypedDict, total=False):
    """The keywords that every call takes; `Group` says what they mean."""

    name: str | None
    timeout_s: float | None
    async_op: bool
    work: bool


class Group:
    """Ranks that do collectives together.

    Every rank makes the same calls in the same order, or gives them the same names.

    Every call takes these keywords:
        name: matches the call with the other ranks' calls of this name; calls of one name, and
            those without any, match by their order. Every name is remembered: reuse a few.
        timeout_s: seconds until the call fails; None takes the group's.
        async_op: return a `Work` at once, and work on it in the background.
        work: return a `Work` at once for the caller to `wait()` on next; nobody works before that.

    Otherwise a call returns None when the result is there. Buffers are Spans or whatever
    `span_of` takes; they are borrowed until the call is done.

    Raises (every call):
        UsageError: bad arguments, and nothing has moved; or the ranks called different things,
            and the group has ended.
        PeerLost: a rank is gone, and the group has ended. Buffers are partly folded.
        TimedOut: the deadline passed, and the group has ended.
        Closed: the group was closed or aborted.
    """

    def __init__(
        self,
        world: World,
        members: Sequence[int],
        name: str,
        timeout_s: float,
        *,
        owns_world: bool = False,
    ) -> None:
        self._world = world
        self._members = members
        self.name = name
        self.rank = members.index(world.rank)
        self.size = len(members)
        self.timeout_s = timeout_s
        self.topology = Topology(self.size, len({world.names[rank].host_id for rank in members}))
        self._owns_world = owns_world
        self._forced = forced_algorithm()
        self._native: engine.NativeGroup | _NoGroup = world.enrol(self, name, members)
        self._next_key = itertools.count(1)
        self._n_named: defaultdict[str, int] = defaultdict(int)
        self._n_sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._plans: dict[tuple[object, ...], engine.Plan] = {}

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {self.size}"

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Collectives.

    def all_reduce(self, data: Any, op: Op | str = Op.SUM, **how: Unpack[How]) -> Work | None:
        """Fold `data` over all ranks, in place: the same bits on every rank.

        Args:
            data: any number of elements, as many and of the same type on every rank.
            op: sum, avg, product, min, max, band, bor or bxor; avg of integers truncates.
        """
        span = span_of(data)
        key = ("all_reduce", span.dtype, op, span.n_elems)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, span, parse_op(op))
        return self._start_in_place(plan, span, how)

    def broadcast(self, data: Any, root: int = 0, **how: Unpack[How]) -> Work | None:
        """Overwrite `data` with that of rank `root`."""
        self._check_rank(root, "root")
        span = span_of(data)
        key = ("broadcast", span.dtype, root, span.n_elems)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, span, root=root)
        return self._start_in_place(plan, span, how)

    def all_gather(self, outputs: Any, data: Any, **how: Unpack[How]) -> Work | None:
        """Collect every rank's `data` in `outputs`, in rank order.

        Args:
            outputs: one buffer of size * n elements, or `size` buffers of n; written.
            data: n elements; read. It may be this rank's own part of `outputs`.
        """
        span = span_of(data, writable=False)
        spans = self._blocks("outputs", outputs, span, writable=True)
        key = ("all_gather", span.dtype, None, span.n_elems)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, span)
        memory = [[], [span.address], [part.address for part in spans]]
        return self._start(plan, memory, (span, spans), self._key(how), how)

    def reduce_scatter(
        self, output: Any, inputs: Any, op: Op | str = Op.SUM, **how: Unpack[How]
    ) -> Work | None:
        """Fold block r of every rank's `inputs` into the `output` of rank r.

        Args:
            output: n elements; written. It may be this rank's own block of `inputs`.
            inputs: one buffer of size * n elements, or `size` buffers of n; never written.
        """
        span = span_of(output)
        spans = self._blocks("inputs", inputs, span, writable=False)
        key = ("reduce_scatter", span.dtype, op, span.n_elems)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, span, parse_op(op))
        memory = [[], [part.address for part in spans], [span.address]]
        return self._start(plan, memory, (span, spans), self._key(how), how)

    def barrier(self, **how: Unpack[How]) -> Work | None:
        """Return when every rank has called it."""
        token = span_of(bytearray(1))
        key = ("barrier", token.dtype, None, 1)
        plan = self._plans.get(key)
        if plan is None:
            shape = Shape("all_reduce", "direct", token.dtype, Op.BOR, 1, self.rank, self.size)
            plan = self._plans[key] = plan_for(shape._replace(title="barrier"))
        return self._start_in_place(plan, token, how)

    def send(self, data: Any, to: int, tag: int = 0, **how: Unpack[How]) -> Work | None:
        """Send `data` to rank `to`; small messages return before they are received."""
        return self._point("send", data, to, tag, how)

    def recv(self, data: Any, source: int, tag: int = 0, **how: Unpack[How]) -> Work | None:
        """Overwrite `data` with the next unreceived send of this tag from rank `source`."""
        return self._point("recv", data, source, tag, how)

    # Membership.

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """The group of some of this group's ranks; the caller must be one of them.

        Local: nothing is said to anyone, no thread or memory is added. Every member must call it
        with the same ranks in the same order and the same name.
        """
        if isinstance(self._native, _NoGroup):
            raise Closed(self._native.why)
        for rank in ranks:
            self._check_rank(rank, "ranks")
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise UsageError(f"{self}: ranks {list(ranks)} repeat a rank or lack this one")
        members = [self._members[rank] for rank in ranks]
        return Group(self._world, members, f"{self.name}/{name}", self.timeout_s)

    def abort(self, reason: str = "no reason was given") -> None:
        """End the group on every rank: what is in flight and all later calls raise `Closed`."""
        self._native.abort(reason)

    def close(self) -> None:
        """Leave. Peers that still need this rank get `PeerLost`. Idempotent.

        The group that `form` made takes its subgroups and all links with it.
        """
        if self._owns_world:
            self._world.close()
            for group in list(self._world.groups):
                group.forsake("it was closed")
        else:
            self._native.drop()
            self.forsake("it was closed")

    def forsake(self, why: str = "a forked child has no part in its parent's groups") -> None:
        """Refuse all later calls, and say nothing to anyone."""
        self._native = _NoGroup(f"{self}: {why}")

    def error_from(self, native: tuple[int, int, str, str]) -> ShoalError | None:
        """The exception that a native error of this group stands for."""
        return engine.error_from(native, self._members, self._world.names)

    # How calls start.

    def _plan(
        self, key: tuple[Any, ...], span: Span, op: Op = Op.SUM, root: int = 0
    ) -> engine.Plan:
        collective = key[0]
        if collective in ("all_reduce", "reduce_scatter") and not engine.can_fold(span.dtype, op):
            raise UsageError(f"{self}: {collective} has no {op} of {span.dtype}")
        choice = choose(collective, span.n_bytes, self.topology, self._forced)
        _LOG.info("%s: %s %s: %s", self, collective, choice.name, choice.why)
        plan = plan_for(
            Shape(
                *(collective, choice.name, span.dtype, op, span.n_elems),
                *(self.rank, self.size, root),
            )
        )
        if len(self._plans) >= 1024:  # sizes that never come back
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _start_in_place(self, plan: engine.Plan, span: Span, how: How) -> Work | None:
        background = how.get("async_op", False)
        call = self._native.post_in_place(
            plan, self._key(how), span.address, self._timeout(how), background
        )
        return self._finish(Work(self, call, span), background or how.get("work", False))

    def _start(
        self, plan: engine.Plan, memory: list[list[int]], owners: object, key: int, how: How
    ) -> Work | None:
        background = how.get("async_op", False)
        call = self._native.post(plan, key, memory, self._timeout(how), background)
        return self._finish(Work(self, call, owners), background or how.get("work", False))

    def _key(self, how: How) -> int:
        name = how.get("name")
        if name is None:
            return next(self._next_key)
        self._n_named[name] += 1
        return _NAMED | _hash(name, self._n_named[name]) >> 2

    def _timeout(self, how: How) -> float:
        if not how.keys() <= How.__annotations__.keys():
            unknown = ", ".join(how.keys() - How.__annotations__.keys())
            raise TypeError(
                f"unknown keywords {unknown}; known are {', '.join(How.__annotations__)}"
            )
        timeout_s = how.get("timeout_s")
        return self.timeout_s if timeout_s is None else timeout_s

    def _finish(self, work: Work, unfinished: bool) -> Work | None:
        if unfinished:
            live = self._world.live
            while live and live[0].done():
                live.popleft()
            live.append(work)
            return work
        try:
            work.wait()
        finally:
            if not work.done():  # interrupted
                self._world.live.append(work)
        return None

    def _point(self, kind: str, data: Any, peer: int, tag: int, how: How) -> Work | None:
        self._check_rank(peer, "to" if kind == "send" else "source")
        if peer == self.rank:
            raise UsageError(f"{self}: a rank cannot {kind} to or from itself")
        span = span_of(data, writable=kind == "recv")
        plan = plan_for(
            Shape(
                *("send_recv", kind, span.dtype, Op.SUM, span.n_elems),
                *(self.rank, self.size, peer),
            )
        )
        ends = (self.rank, peer, tag) if kind == "send" else (peer, self.rank, tag)
        self._n_sent[ends] += 1
        key = _POINT | _hash(*ends, self._n_sent[ends]) >> 1
        return self._start(plan, [[span.address]], span, key, how)

    def _blocks(self, what: str, given: Any, block: Span, *, writable: bool) -> list[Span]:
        """One Span over all blocks, or one per rank."""
        if not isinstance(given, Sequence) or isinstance(given, (Span, bytes, bytearray)):
            spans, wanted = [span_of(given, writable=writable)], block.n_elems * self.size
        else:
            spans, wanted = [span_of(each, writable=writable) for each in given], block.n_elems
            if len(spans) != self.size:
                raise UsageError(f"{self}: {len(spans)} {what}; one per rank, {self.size}, needed")
        for span in spans:
            if span.n_elems != wanted or span.dtype is not block.dtype:
                raise UsageError(
                    f"{self}: {what} hold {span.dtype}[{span.n_elems}], "
                    f"need {block.dtype}[{wanted}]"
                )
        return spans

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{self}: {what} names rank {rank}; ranks are 0 to {self.size - 1}")
