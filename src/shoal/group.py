"""Groups of ranks and the collectives they do.

`form` meets the other ranks and makes the world group; `Group.subgroup` carves smaller ones out
of it, locally and for free.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict

from shoal import engine
from shoal.buffers import Span, span_of
from shoal.dtypes import Op, parse_op
from shoal.engine import Shape, plan_for
from shoal.errors import Closed, ShoalError, UsageError
from shoal.plan import Topology, choose
from shoal.plan.choose import forced_algorithm
from shoal.work import Work
from shoal.world import World, hash_of, meet

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.rendezvous import Store

_LOG: Final = logging.getLogger("shoal")

DEFAULT_TIMEOUT_S: Final = 300.0

# Three kinds of calls share the 64-bit key space of a group.
_NAMED: Final = 1 << 62
_POINT: Final = 1 << 63


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
    forced_algorithm()  # a wrong name is refused before anyone is kept waiting
    world = meet(store, rank, size, timeout_s)
    return Group(world, list(range(size)), name, timeout_s, owns_world=True)


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
        numbers: dict[str, int] = {}
        self.topology = Topology(
            tuple(numbers.setdefault(world.names[m].host_id, len(numbers)) for m in members)
        )
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

    def forsake(self, why: str) -> None:
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
                hosts=self.topology.hosts,
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
        return _NAMED | hash_of(name, self._n_named[name]) >> 2

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
        key = _POINT | hash_of(*ends, self._n_sent[ends]) >> 1
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
