"""Starts calls: checks the arguments, finds a plan, and gives the memory to the engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict

from shoal import engine
from shoal.codec import Codec, parse_wire
from shoal.dtypes import DType, Op
from shoal.engine import make_plan, plan_for
from shoal.errors import Closed, PeerLost, ShoalError, UsageError
from shoal.group.buffers import BlockBuffers, BufferView, blocks_of, clash, span_of
from shoal.group.context import Occurrences, hash_of
from shoal.group.numbers import Numbers
from shoal.group.subjects import Subjects
from shoal.group.work import FOR_EVER_S, Work, wait_long
from shoal.limits import FIRST_NAMED_KEY
from shoal.schedule import COLLECTIVES, MESSAGE
from shoal.shapes import Shape
from shoal.state import AtDeadline

if TYPE_CHECKING:
    from shoal.group.context import Context
    from shoal.plan import Planner
    from shoal.state.monitor import Monitor

_LOG: Final = logging.getLogger("shoal")

# A group's narrow wire is for longer buffers. Shorter buffers gain nothing, since a message costs
# more than its bytes, and small sums need all digits: numbers of samples, losses, norms.
WIRE_FLOOR_BYTES: Final = 64 << 10


class ClosedGroup:
    """Replaces a native group that is gone, and refuses every call."""

    def __init__(self, why: str) -> None:
        self.why = why

    def post(self, *_call: object) -> NoReturn:
        """Raise Closed."""
        raise Closed(self.why)

    post_in_place = post_message = post

    def error(self) -> tuple[engine.Fault, int, str, str]:
        """Return the error of a native group that was closed."""
        return engine.Fault.CLOSED, -1, self.why, ""

    def abort(self, *_args: object) -> None:
        """Do nothing, and return None."""

    drop = fail = has_message = notify = take_state_at_deadline = abort


class CallOptions(TypedDict, total=False):
    """The keywords that every call takes, see `Group`."""

    name: str | None
    number: int | None
    subject: int
    timeout_s: float | None
    async_op: bool
    work: bool


_KNOWN: Final = CallOptions.__annotations__.keys()


class Calls:
    """The calls of one rank in one group; `Group` adds the collectives."""

    peer_lost_remedy = PeerLost.remedy
    """The end of messages of `PeerLost`; front ends whose users do not shrink groups set theirs."""

    def __init__(
        self,
        context: Context,
        members: Sequence[int],
        name: str,
        timeout_s: float,
        planner: Planner,
        wire: Codec = Codec.IDENTITY,
        native_id: int | None = None,
    ) -> None:
        self._context = context
        self._members = members
        self.name = name
        self.rank = members.index(context.rank)
        self.size = len(members)
        self.timeout_s = timeout_s
        self.planner = planner
        self.wire = wire
        self._is_warned = False  # of a sum in a coarse codec
        self._native: engine.NativeGroup | ClosedGroup = context.register(
            self, name, members, native_id
        )
        self._unheld: weakref.finalize[..., Calls] | None = None
        self._numbers = Numbers(str(self))
        self._named = Occurrences("calls")
        self.subjects = Subjects()
        self._plans: dict[tuple[object, ...], engine.Plan] = {}
        self._at_deadline = AtDeadline()
        self.kept: dict[object, Any] = {}  # front ends' objects, until the group is closed

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {self.size}"

    @property
    def members(self) -> tuple[int, ...]:
        """The members' ranks in the whole mesh."""
        return tuple(self._members)

    @property
    def mesh(self) -> engine.Mesh | None:
        """The links; None once they are closed."""
        return self._context.mesh

    @property
    def monitor(self) -> Monitor | None:
        """The server for `shoal top` of this group's world; None without `SHOAL_MONITOR`."""
        return self._context.monitor

    def await_at_close(self, call: engine.Call) -> None:
        """Let the closing of the links wait for a call that no caller waits for."""
        self._context.await_at_close(call)

    @property
    def native_id(self) -> int | None:
        """The number of the group in the native core; None once it is closed."""
        return None if isinstance(self._native, ClosedGroup) else self._native.id

    def _check_open(self) -> engine.NativeGroup:
        """Return the native group; Closed if this group was closed."""
        native = self._native
        if isinstance(native, ClosedGroup):
            raise Closed(native.why)
        return native

    def ended(self) -> ShoalError | None:
        """Return the error that later calls raise; None while the group lives, or once closed."""
        native = self._native
        return None if isinstance(native, ClosedGroup) else self.error_from(native.error())

    def abandon(self, why: str) -> None:
        """Refuse all later calls, without a message to other ranks."""
        self._native = ClosedGroup(f"{self}: {why}")
        self.kept.clear()
        self._plans.clear()  # a program may keep the first of many views
        if self._unheld is not None:  # it would keep the mesh's descriptors
            self._unheld.detach()

    def end_with_its_holders(self) -> None:
        """Leave the group, as `close` does, when it is not referenced any more."""
        self._unheld = weakref.finalize(self, self._context.let_go, self._native)
        self._unheld.atexit = False  # the links close at exit

    def plan_by(self, planner: Planner) -> None:
        """Use another planner from now on; every rank must do so before the same call."""
        self.planner = planner
        self._plans.clear()

    def error_from(self, native: tuple[engine.Fault, int, str, str]) -> ShoalError | None:
        """Return the exception for a native error of this group."""
        fault, peer, what, doing = native
        if fault is engine.Fault.TIMED_OUT and (
            note := self._at_deadline.note(self._context, self._native)
        ):
            native = (fault, peer, f"{what}; {note}", doing)
        if fault is engine.Fault.MISMATCH:
            native = (fault, peer, what + self.subjects.describe(what), doing)
        error = engine.error_from(native, self._members, self._context.names)
        if isinstance(error, PeerLost):
            error.remedy = self.peer_lost_remedy
        return error

    # Plans.

    def _plan(
        self,
        key: tuple[Any, ...],
        dtype: DType,
        n_elems: int,
        op: Op = Op.SUM,
        root: int = 0,
        *,
        wire: str | Codec | None = None,
        subject: int = 0,
    ) -> engine.Plan:
        """Make a plan, and keep it under `key`, which begins with the collective's name."""
        shape = self._shape(key[0], dtype, n_elems, op, root, wire=wire)
        if wire is None and not subject:
            self._check_wire(shape.codec)
        if len(self._plans) >= 1024:  # sizes that never repeat
            self._plans.clear()
        plan = self._plans[key] = plan_for(shape)
        return plan

    def _uneven_plan(
        self,
        collective: str,
        dtype: DType,
        op: Op = Op.SUM,
        *,
        blocks: tuple[int, ...] = (),
        sent: tuple[int, ...] = (),
        taken: tuple[int, ...] = (),
        wire: str | Codec | None = None,
    ) -> engine.Plan:
        """Make the plan of a call whose lengths are unlikely to repeat, see `Shape`."""
        # The choice must not depend on lengths that only this rank knows.
        shape = self._shape(collective, dtype, max(blocks, default=0), op, uneven=True, wire=wire)
        return make_plan(shape._replace(n_elems=0, blocks=blocks, sent=sent, taken=taken))

    def _shape(
        self,
        collective: str,
        dtype: DType,
        n_elems: int,
        op: Op = Op.SUM,
        root: int = 0,
        *,
        uneven: bool = False,
        wire: str | Codec | None = None,
    ) -> Shape:
        self.check_fold(collective, dtype, op)
        n_bytes = n_elems * dtype.n_bytes
        codec = self._codec(collective, dtype, op, n_bytes, wire)
        choice = self.planner.choose(collective, n_bytes, uneven, codec)
        return Shape(
            *(collective, choice.name, dtype, op, n_elems),
            *(self.rank, self.size, root),
            hosts=self.planner.cluster.hosts,
            codec=codec,
            n_lanes=self.planner.n_lanes(collective, n_bytes),
        )

    def check_fold(self, collective: str, dtype: DType, op: Op) -> None:
        """Raise UsageError if the collective does not support this operation for this type."""
        if COLLECTIVES[collective].folds and not engine.can_fold(dtype, op):
            raise UsageError(f"{self}: {collective} has no {op} of {dtype}")

    def _codec(
        self, collective: str, dtype: DType, op: Op, n_bytes: int, asked: str | Codec | None
    ) -> Codec:
        """Return the codec that a call asks for, else the group's; UsageError if it is unusable."""
        codec = self.wire if asked is None else parse_wire(asked)
        if not codec.is_narrow:
            return codec
        can = COLLECTIVES[collective].narrows and engine.can_encode(codec, dtype, op)
        if asked is None:
            return codec if can and n_bytes >= WIRE_FLOOR_BYTES else Codec.IDENTITY
        if not can:
            raise UsageError(
                f"{self}: {collective} {op} of {dtype} cannot travel in {codec}, which is for sum "
                "and avg, or all_gather, of float32; leave out the wire, or give 'identity'"
            )
        return codec

    def _check_wire(self, codec: Codec) -> None:
        """Warn once if the group's codec has blocks, for a sum outside of averagers."""
        if codec.block == 1 or self._is_warned or self.planner.cluster.n_hosts == 1:
            return
        self._is_warned = True
        _LOG.log(
            logging.WARNING if self.rank == 0 else logging.DEBUG,
            "%s: a sum outside of an averager is sent in %s, the group's wire, which changes an "
            "element by up to %g times the largest of the %d around it, twice. Such formats are "
            "for gradients: give wire='identity' to other sums",
            *(self, codec, codec.error, codec.block),
        )

    def _rounded_into(self, own: BufferView, data: BufferView, codec: Codec) -> BufferView:
        """Return `own` with a rounded copy of `data`; just `data` if all ranks share a host."""
        if self.planner.cluster.n_hosts == 1:
            return data
        if own.address != data.address:
            engine.stream_copy(own.address, data.address, data.n_bytes)
        engine.round_to(codec, own.dtype, own.address, own.n_elems)
        return own

    # Arguments.

    def _blocks(self, what: str, given: Any, *, writable: bool) -> BlockBuffers:
        try:
            return blocks_of(given, self.size, writable=writable)
        except UsageError as error:
            raise UsageError(f"{self}: {what}: {error}") from None

    def _check_own(self, what: str, blocks: BlockBuffers, whose: str, own: BufferView) -> None:
        dtype, n_elems = blocks.spans[0].dtype, blocks.lengths[self.rank]
        if (dtype, n_elems) != (own.dtype, own.n_elems):
            raise UsageError(
                f"{self}: {what} hold {dtype}[{n_elems}] for this rank, "
                f"but its {whose} is {own.dtype}[{own.n_elems}]"
            )

    def _at_root(
        self, what: str, given: Any, whose: str, own: BufferView, root: int
    ) -> Sequence[BufferView]:
        """Return all ranks' blocks, each as long as `own`, at the root; () elsewhere."""
        self._check_rank(root, "root")
        if self.rank != root:
            if given is not None:
                raise UsageError(f"{self}: only the root, rank {root}, has {what}; pass None")
            return ()
        if given is None:
            raise UsageError(f"{self}: this rank is the root and needs {what}")
        blocks = self._blocks(what, given, writable=what == "outputs")
        self._check_own(what, blocks, whose, own)
        if not blocks.even:
            raise UsageError(
                f"{self}: {what} hold {list(blocks.lengths)} elements; all blocks need "
                f"{own.n_elems}, as many as {whose}"
            )
        one = BlockBuffers((own,), (own.n_elems,))
        if what == "outputs":
            self._check_apart(what, blocks, whose, one)
        else:
            self._check_apart(whose, one, what, blocks)
        return blocks.spans

    def _check_apart(
        self, out: str, written: BlockBuffers, source: str, read: BlockBuffers
    ) -> None:
        """Raise UsageError if written memory overlaps other memory of the call.

        This rank's own block may be the same memory in both.
        """
        if len(written.spans) == len(read.spans) == 1:  # the usual case, without loops
            one, other = written.spans[0], read.spans[0]
            if (
                one.address + one.n_bytes <= other.address
                or other.address + other.n_bytes <= one.address
            ):
                return
        outputs, inputs = written.ranges(), read.ranges()
        own = self.rank if len(inputs) > 1 else 0
        if inputs[own] == outputs[self.rank if len(outputs) > 1 else 0]:
            inputs[own] = (0, 0)
        found = clash(outputs, inputs)
        if found is None:
            return
        first, second, both_written = found
        here = f"{out}[{first}]" if len(outputs) > 1 else out
        there = out if both_written else source
        there += f"[{second}]" if len(outputs if both_written else inputs) > 1 else ""
        raise UsageError(
            f"{self}: {here} and {there} overlap in memory; only this rank's own block, "
            f"{self.rank}, may be the same in both"
        )

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{self}: {what} names rank {rank}; ranks are 0 to {self.size - 1}")

    # Starting.

    def _start_in_place(self, plan: engine.Plan, span: BufferView, how: CallOptions) -> Work | None:
        timeout_s, background, subject = self.timeout_s, False, 0
        if how:
            timeout_s, background = self._timeout(how), how.get("async_op", False)
            subject = how.get("subject", 0)
        key = self._key(how)
        held = self._hold(span)
        call = self._native.post_in_place(plan, key, span.address, timeout_s, background, subject)
        return self._finish(call, plan, held, how)

    def _start_between(
        self,
        plan: engine.Plan,
        read: Sequence[BufferView],
        written: Sequence[BufferView],
        how: CallOptions,
    ) -> Work | None:
        timeout_s, key = self._timeout(how), self._key(how)
        memory = [[], [span.address for span in read], [span.address for span in written]]
        background, subject = how.get("async_op", False), how.get("subject", 0)
        held = self._hold((read, written))
        call = self._native.post(plan, key, memory, timeout_s, background, subject)
        return self._finish(call, plan, held, how)

    def _message(
        self, kind: str, data: Any, peer: int | None, tag: int, how: CallOptions
    ) -> Work | None:
        if peer is not None:
            self._check_rank(peer, "to" if kind == "send" else "source")
        if peer == self.rank or self.size == 1:
            raise UsageError(f"{self}: a rank cannot {kind} to or from itself")
        if not -(1 << 63) <= tag < 1 << 63:
            raise UsageError(f"{self}: tag {tag} does not fit in 64 bits")
        if any(how.get(key) is not None for key in ("name", "number", "subject")):
            raise UsageError(f"{self}: a message has a tag, not a name, a number or a subject")
        span = span_of(data, writable=kind == "recv")
        at = -1 if peer is None else peer
        shape = Shape(MESSAGE, kind, span.dtype, Op.SUM, span.n_elems, self.rank, self.size, at)
        timeout_s, background = self._timeout(how), how.get("async_op", False)
        plan = plan_for(shape)
        held = self._hold(span)
        call = self._native.post_message(
            *(plan, kind == "send", at, tag, span.address, timeout_s, background)
        )
        return self._finish(call, plan, held, how)

    def _hold(self, owners: object) -> list[object]:
        """Keep the owners of buffers alive for a call to post; Closed if this group was closed.

        NOT after `post`: Ctrl-C in between would free buffers that the engine writes to. If it
        interrupts a call before `Context.keep`, they live until the links are closed.
        """
        self._check_open()
        held = [owners]
        self._context.held[id(held)] = held
        return held

    def _key(self, how: CallOptions) -> int:
        if not how:  # the usual case
            return self._numbers.take()
        name = how.get("name")
        if name is None:
            return self._number(how)
        if how.get("number") is not None:
            raise UsageError(f"{self}: a call has a name or a number, but got both")
        return FIRST_NAMED_KEY | hash_of(name, self._named.count(name)) >> 2

    def _number(self, how: CallOptions) -> int:
        number = how.get("number")
        return self._numbers.take() if number is None else self._numbers.use(number)

    def _timeout(self, how: CallOptions) -> float:
        if not how:  # the usual case
            return self.timeout_s
        if not how.keys() <= _KNOWN:
            unknown = ", ".join(how.keys() - _KNOWN)
            raise TypeError(f"unknown keywords {unknown}; known are {', '.join(_KNOWN)}")
        timeout_s = how.get("timeout_s")
        if timeout_s is None:
            return self.timeout_s
        if not timeout_s >= 0:  # NaN too
            raise UsageError(f"{self}: timeout_s must be a number >= 0, got {timeout_s}")
        return timeout_s

    def _finish(
        self, call: engine.Call, plan: engine.Plan | None, held: list[Any], how: CallOptions
    ) -> Work | None:
        """Wait for a posted call, or return its `Work`; `held` is from `_hold`.

        `plan` is None for an all-reduce with servers, which has several.
        """
        if (tally := self._context.tally) is not None:
            what = "all_reduce" if plan is None else plan.descriptor.partition(" ")[0]
            owners = held[0]
            if isinstance(owners, BufferView):
                n_bytes = owners.n_bytes
            else:
                n_bytes = max(sum(span.n_bytes for span in spans) for spans in owners)
            tally.note(call, self.native_id, what, n_bytes)
        if how and (how.get("async_op") or how.get("work")):
            self._context.keep(call, held)
            return self._work_of(call, held)
        try:
            wait_long(self, call, FOR_EVER_S)
            self._context.held.pop(id(held), None)  # None: closed meanwhile
        except BaseException:  # interrupted
            self._context.keep(call, held)
            raise
        if not call.succeeded():
            self._work_of(call, held).wait()  # raises the call's error
        return None

    def _work_of(self, call: engine.Call, held: list[object]) -> Work:
        return Work(self, call, held)
