"""`Averager` averages arrays over all ranks, one fusion buffer at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.average.agreeing import FirstOrder, SameCheck, agree, checked_interval, shared_by
from shoal.average.compress import ChunkTopK, check_hosts, parse_compress
from shoal.average.departures import Departures, words_for
from shoal.average.feedback import Feedback
from shoal.average.lacking import GO_ON, check_alive, end_group, explaining, named
from shoal.average.layout import ALIGN_BYTES, FLOATS, ArraySpec, Layout
from shoal.average.memory import ArrayMemory
from shoal.average.preparing import Preparation, numpy_arrays
from shoal.average.report import AveragingReport, report_on
from shoal.average.step_times import StepLog, StepTimes
from shoal.dtypes import DType, Op
from shoal.engine import Countdown, can_fold
from shoal.errors import ShoalError, Unsupported, UsageError
from shoal.plan.fusion import choose_fusion
from shoal.plan.quantities import bytes_from

if TYPE_CHECKING:
    from shoal.average.compress import Scheme
    from shoal.group.buffers import BufferView
    from shoal.group.group import Group

_LOG: Final = logging.getLogger("shoal")

# The most buffers of a step; a larger step gets buffers longer than requested. A group can reserve
# twice as many calls.
_MOST_BUFFERS: Final = 1024


class Averager:
    """Averages named arrays over all ranks of a group, step by step.

    ::

        averager = Averager(group, {"w": ((256, 128), "float32"), "b": ((128,), "float32")})
        for batch in batches:
            gradients = averager.begin()
            gradients["b"][...] = ...  # in any order, on any rank
            averager.ready("b")
            ...
            averager.wait()  # now they are averages, the same bits on every rank

    The averager owns the memory of the arrays, which is allocated like `shoal.empty`'s. The arrays
    are flattened into *fusion buffers* of equal length. A buffer is sent as soon as all its arrays
    are ready, while the caller computes the others, whatever the order on other ranks. The first
    step expects arrays in the reverse of the order in which they are named; later steps in the
    order in which they became ready on rank 0.

    Every rank creates its averager with the same arguments, and calls `begin` and `wait` equally
    often. Any thread may call it, one at a time. An averager that is dropped within a step keeps
    its memory until the buffers in flight are done.

    Args:
        arrays: by name: a shape and a dtype, or any object with both. Values are not copied.
        fusion_bytes: the longest buffer; None: `SHOAL_FUSION_BYTES`, or the planner's choice.
        wire: the codec of float32 between hosts, see `Group.all_reduce`.
        compress: a codec, as for `wire`; or `ErrorFeedback` or `ChunkTopK`, which add a value's
            rounding error to the same value in the next step. These round values even if all ranks
            share a host, and need 8 more bytes for each element, and NumPy.
        find_unused: arrays may never become ready in a step, and which ones may differ by rank.
            Costs a small all-reduce in `wait`.
        weighted: `begin` takes the weight of this rank. Costs a small all-reduce, which overlaps
            with computing, and a pass over memory; needs NumPy.
        check_finite: check the values of this rank before they are sent; `wait` raises `NotFinite`.
            Costs a pass over memory and a small all-gather in `wait`; needs NumPy.
        check_same: the method `check_same` compares values in every N-th step; 0: never.
        fill: for front ends: called with the indices of arrays before their buffer is sent, to
            write their values into `memory`, even for arrays that are ready only on other ranks. It
            must not keep the averager or its hooks alive, because Python's cycle collector cannot
            see all references. If it raises, so does `ready`, and the buffer is not sent. None: an
            array holds its values when it is ready.

    Attributes:
        arrays: by name, what `begin` returns.
        unused: after `wait` with `find_unused`, the indices of the arrays that no rank had.

    Raises:
        UsageError: there is nothing to average, an option is wrong, or a dtype has no average, or
            ranks pass different arrays or options (on every rank, with the first difference and the
            ranks; the group is usable), or another rank has ended its first step with arrays
            missing (see `send_rest`).
        Unsupported: `ChunkTopK`, and ranks share one of several hosts, or the group has had 255
            averagers since one with `ChunkTopK` that is still alive.
        ShoalError: the machine has too little memory; or as for every call of the group.

    Source: Herring (SC 2020), III-1 and III-2; Li et al., "PyTorch Distributed" (VLDB 2020);
    docs/decisions/0034 and 0059.
    """

    def __init__(  # noqa: PLR0913 - options of a step are given by name
        self,
        group: Group,
        arrays: Mapping[str, Any],
        *,
        fusion_bytes: int | None = None,
        wire: str | None = None,
        compress: str | Scheme | None = None,
        find_unused: bool = False,
        weighted: bool = False,
        check_finite: bool = False,
        check_same: int = 0,
        fill: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.entries = tuple(ArraySpec.of(name, given) for name, given in arrays.items())
        self._indices = {entry.name: index for index, entry in enumerate(self.entries)}
        self._find_unused, self._weighted = find_unused, weighted
        self._asked_bytes = fusion_bytes
        self._options: dict[str, Any] = {
            "wire": wire,
            "compress": compress,
            "find_unused": find_unused,
            "weighted": weighted,
            "check_finite": check_finite,
            "check_same": checked_interval(check_same),
        }
        wire, scheme = parse_compress(compress, wire, self.entries)
        self._feedback = None if scheme is None else Feedback(scheme)
        self._departures = Departures(wire, fill, self._feedback, finds_unused=find_unused)
        self.countdown = Countdown(self._departures.send)
        self._next_layout: Layout | None = None
        self._is_open = self._is_sent = False
        self.arrays: dict[str, Any] = {}
        self.unused: tuple[int, ...] = ()
        self.log = StepLog()
        self._over: weakref.finalize[..., Averager] | None = None
        layout = self._join(group, range(len(self.entries))[::-1], is_known=False)
        self._memory = ArrayMemory(layout, str(self))
        self._lay_out(layout)

    def _join(self, group: Group, order: Sequence[int], *, is_known: bool) -> Layout:
        """Average in this group from now on, and return the layout to use; every rank calls it.

        A new averager and one from another group make the same calls, so ranks may mix them.

        Args:
            order: the order of the arrays, if this is rank 0.
            is_known: True if a first step has shown that order.
        """
        self.group = group
        self._shared = shared_by(group)
        self.name = f"averager {next(self._shared.names)}"
        keeps = isinstance(self._options["compress"], ChunkTopK)
        subject = group.subjects.add(words_for(list(self._indices)), keeps=keeps)
        rival = group.subjects.rival(subject)
        self.fusion_bytes = self._fusion_bytes(self._asked_bytes)
        check_hosts(self._options["compress"], group.planner.cluster.hosts)
        self._same = SameCheck(group, self._options["check_same"])
        options = {"fusion_bytes": self.fusion_bytes} | self._options
        options |= {"rival": rival.what} if rival else {}  # not dropped on all ranks yet
        with explaining(group):  # another rank may have ended its first step already
            agree(group, self.name, self.entries, options)
            if rival is not None:
                raise Unsupported(
                    f"{self}: the averager of {rival.what} has the same number in this group, and "
                    "reducers would mix the values that ChunkTopK leaves to them: drop that "
                    "averager first, or make this one in a subgroup"
                )
            order = self._follow_rank_0(group, order, is_known=is_known)
        layout = Layout.of(self.entries, order, self.fusion_bytes)
        self._check_types()
        self._preparation = None
        has_float16 = any(one.dtype is DType.FLOAT16 for one in self.entries)
        check_finite = self._options["check_finite"]
        if self._weighted or check_finite or has_float16:
            self._preparation = Preparation(
                group, self.name, weighted=self._weighted, check_finite=check_finite
            )
        self._departures.join(group, subject, self._preparation)
        if self._over is not None:
            self._over.detach()
        self._over = weakref.finalize(self, self._shared.drop, self.open_calls, self.countdown)
        self._over.atexit = False
        return layout

    def _follow_rank_0(
        self, group: Group, order: Sequence[int], *, is_known: bool
    ) -> Sequence[int]:
        """Adopt rank 0's step counts, and return its order of arrays."""
        n_rounded = 0 if self._feedback is None else self._feedback.n_steps
        known = array("q", [self.log.n_steps, n_rounded, is_known, *order])
        group.broadcast(known, 0, name=self.name)
        self._order = FirstOrder(group, f"{self.name}, order", is_known=bool(known[2]))
        self._next_layout = None
        self.log.n_steps = self._departures.n_steps = known[0]
        if self._feedback is not None:
            self._feedback.follow(known[1])
        return known[3:]

    def regroup(self, group: Group, *, fill: Callable[[Sequence[int]], None] | None = None) -> None:
        """Continue in another group, such as `group.shrink()`, even after an error within a step.

        Every rank of the group calls it; a rank that is new to the group creates its averager at
        the same point. A step under way is given up: the contents of its arrays are undefined, and
        all ranks repeat it from `begin`. The order of arrays, the times of steps, hooks and
        residuals are kept. The length of buffers is chosen for the new group.

        If a step has ended on some ranks only, it counts for residuals if it ended on rank 0. So
        all ranks must continue from the weights of rank 0. Values kept back by reducers are lost.

        Args:
            fill: for front ends: replaces the earlier `fill`.

        Raises:
            UsageError: a step is under way in a group that has not ended (nothing has changed), or
                ranks average different arrays or have other options.
            ShoalError: as for every call of the new group; call it again with the next group.
        """
        if self.is_under_way and self.group.native_id is not None and self.group.ended() is None:
            raise UsageError(f"{self}: regroup within a step; call wait() first")
        self._departures.give_up_step()
        self._departures.fill = fill or self._departures.fill
        self._shared.dropped.append(set(self.open_calls))  # the old group may still be used
        self.open_calls.clear()
        self.countdown.paused = True
        self._is_open = False
        self._memory.forget_aside()
        with contextlib.suppress(ShoalError):  # the order was in flight, and is lost
            self.next_layout()
        order = (self._next_layout or self.layout).order
        self._lay_out(self._join(group, order, is_known=self._order.is_known))

    def _fusion_bytes(self, asked: int | None) -> int:
        """Return the longest length of a buffer; the same on every rank."""
        total = sum(entry.n_bytes for entry in self.entries)
        name, otherwise = "SHOAL_FUSION_BYTES", "the planner chooses"
        if asked is None:
            asked = bytes_from(os.environ, name, ALIGN_BYTES, 1 << 40, otherwise)
        if asked is None:
            is_served = getattr(self.group, "pool", None) is not None
            asked, why = choose_fusion(total, self.group.planner, has_servers=is_served)
            _LOG.debug("%s: %s", self, why)
        return max(asked, total // _MOST_BUFFERS) if asked > 0 else asked

    def _check_types(self) -> None:
        for entry in self.entries:
            if not can_fold(entry.dtype, Op.AVG):
                raise UsageError(f"{self}: there is no average of {entry}")
            if self._weighted and entry.dtype not in FLOATS:
                raise UsageError(f"{self}: {entry} has no fractions to be weighted; convert it")

    # A step.

    def begin(self, weight: float | None = None, *, reserve: bool = True) -> dict[str, Any]:
        """Begin a step. The arrays of the last step may now be overwritten.

        A step in which no array was ready may be begun again. The second step moves all arrays:
        their contents are undefined, and NumPy arrays of the first step become read-only.

        Args:
            weight: the weight of this rank's values, if the averager is `weighted`: a number of
                samples or tokens, 0 or more. The average is the sum of all values times weights,
                over the sum of weights.
            reserve: reserve the numbers of this step's calls here. If False, on every rank,
                `reserve` or the first buffer sent reserves them. Until then ranks may abandon the
                step, even some ranks only.

        Returns:
            The arrays by name, in the averager's memory, until the next `begin`: NumPy arrays
            (bfloat16 as uint16 bits), or flat views (`BufferView`) without NumPy. The caller writes
            an array until `ready`, and reads the averages after `wait` or `wait_for`.

        Raises:
            UsageError: the last step has not ended, or a weight is missing, negative, not finite
                or not expected. Nothing has begun.
            ShoalError: as `wait` does; the group has ended.
        """
        check_alive(self.group)
        self._check_weight(weight)
        if self.is_under_way:
            raise UsageError(f"{self}: the previous step has not ended; call wait() first")
        if self._preparation is not None:
            self._preparation.begin(weight)
        self.log.begin_step()
        if self._is_open:
            if reserve:
                self._departures.reserve()
            return self.arrays
        while self._shared.dropped:
            for number in self._shared.dropped.popleft():
                self.group.skip(number)
        layout = self.next_layout()
        if layout is not None:
            self._lay_out(layout)
            self._next_layout = None
        self._departures.begin()
        if reserve:
            self._departures.reserve()
        self.unused = ()
        self.countdown.begin()
        self.countdown.paused = False
        self._is_open, self._is_sent = True, False
        return self.arrays

    def _check_weight(self, weight: float | None) -> None:
        if self._weighted != (weight is not None):
            raise UsageError(f"{self}: begin takes a weight if, and only if, weighted=True")
        if weight is not None and not 0 <= weight < math.inf:
            raise UsageError(f"{self}: weight must be a finite number >= 0, got {weight}")

    def keep_layout(self) -> None:
        """Keep the layout of the first step; every rank calls it before that step."""
        self._order.keep()

    def keep_used(self) -> None:
        """With `find_unused`: expect the last step's arrays from now on; saves an all-reduce.

        Every rank calls it after the same step, and has the same arrays ready in every step from
        this one on, until `regroup`. Idempotent.
        """
        self._departures.keep_used()

    def next_layout(self) -> Layout | None:
        """Return the layout of the next `begin`, if it differs; waits for rank 0's order.

        Raises:
            ShoalError: as `wait` does.
        """
        with explaining(self.group):
            order = self._order.take()
        if order is not None and order != self.layout.order:
            self._next_layout = Layout.of(self.entries, order, self.fusion_bytes)
        self._order.forget()
        return self._next_layout

    @property
    def is_under_way(self) -> bool:
        """True if a step has begun, and an array was ready or the weight was sent."""
        has_sent = self._preparation is not None and self._preparation.has_sent_weight
        return self._is_open and (self.countdown.n_counted > 0 or has_sent)

    def reserve(self) -> None:
        """Reserve the numbers of this step's calls, after `begin(reserve=False)`. Idempotent.

        Every rank calls it at the same place among its calls. Until then, `begin` may be called
        again with another weight.
        """
        self._departures.reserve()

    def ready(self, array: str | int) -> None:
        """Mark an array as ready to be averaged: it holds this rank's values until `wait`.

        Args:
            array: a name, or an index in the order of names.

        Raises:
            UsageError: there is no such array, or no step has begun, or the array was marked
                already in this step. Nothing has changed.
            ShoalError: a buffer cannot be sent; the group has ended.
        """
        index = self.index(array)
        if not self._is_open or self._is_sent:
            raise UsageError(f"{self}: {self.entries[index]} is ready outside a step; call begin()")
        if self.countdown.is_counted(index):
            raise UsageError(f"{self}: {self.entries[index]} was already ready in this step")
        self.countdown.count(index)

    def hook(self, array: str | int) -> Callable[..., None]:
        """Return a function that marks an array as ready, and ignores its arguments.

        It is a C function, without the cost of a Python frame. Outside a step it does nothing; a
        second call in one step makes `wait` raise. It keeps the averager's countdown alive.
        """
        return self.countdown.hook(self.index(array))

    def send_rest(self) -> None:
        """Declare that no more arrays become ready in this step, and send the rest. Idempotent.

        Raises:
            UsageError: arrays never became ready on some rank, and `find_unused` is not set; the
                text names the arrays and the rank. Or an error or Ctrl-C has interrupted a call of
                this step that sends arrays. The group has ended, on every rank.
            ShoalError: as `wait` does.
        """
        if not self._is_open:
            raise UsageError(f"{self}: no step has begun; call begin() first")
        if not self._is_sent:
            self._send_rest()
        if self._departures.is_torn:
            check_alive(self.group)  # otherwise its error is the reason
            why = f"a step on rank {self.group.rank} was interrupted while it sent its arrays"
            end_group(self.group, why)
            raise UsageError(f"{self.group}: {why}{GO_ON}")

    def _send_rest(self) -> None:
        self.countdown.paused = self._is_sent = True
        self.log.note_sent()
        self._departures.reserve()
        if self._find_unused:
            self.unused = self._departures.send_used(self.not_ready())
        elif missing := self.not_ready():
            check_alive(self.group)  # otherwise its error is the reason
            why = (
                f"{named([repr(self.entries[index].name) for index in missing])} never became "
                f"ready on rank {self.group.rank} in a step that it ended; pass find_unused=True "
                "if arrays may be left out"
            )
            end_group(self.group, why)
            raise UsageError(f"{self.group}: {why}{GO_ON}")

    def wait_for(self, array: str | int) -> None:
        """Wait until this array is an average, after `send_rest`; others may be in flight.

        With weights all 0 or `check_finite`, only `wait` reports that values are undefined.

        Raises UsageError before `send_rest`, when buffers may be unsent; else as `wait`.
        """
        if not self._is_sent:
            raise UsageError(f"{self}: call send_rest() before wait_for({array!r})")
        for buffer in self.layout.buffers_of[self.index(array)]:
            self._departures.wait(buffer)

    def done(self) -> bool:
        """Return True if all sent buffers are averages, or have failed.

        After `send_rest`, `wait` then waits for nothing more than the all-gather of `check_finite`.
        """
        return self._departures.done()

    def wait(self) -> None:
        """End the step: wait until all arrays are averages, the same bits on every rank.

        Arrays that were ready on no rank are unchanged; `unused` has their indices.

        Raises:
            UsageError: arrays were not sent, see `send_rest`, and the group has ended. Or an
                array was ready twice, or all weights were 0: the step is over on every rank, and
                these values are undefined.
            NotFinite: on every rank; the step is over.
            TimedOut: a buffer was not averaged in time; names its arrays. The group has ended.
            PeerLost, Closed, ShoalError: as for every call of the group, which has ended.
        """
        wait_ns = time.monotonic_ns()
        self.send_rest()
        for buffer in range(len(self.layout.buffers)):
            self._departures.wait(buffer)
        # Until all of this is done the step is open: after Ctrl-C, `wait` may be called again.
        with explaining(self.group):
            self._order.end_step(self.countdown.order, self.layout.order)
        if self._feedback is not None and not self._feedback.end():
            self._departures.subject.step = 0  # as `_forget_kept_back` after a step
        self._memory.put_back()
        self._is_open = False
        self.log.keep(self._times(wait_ns, time.monotonic_ns()))
        repeated = self.countdown.repeated
        try:
            if self._preparation is not None:
                with explaining(self.group):
                    self._preparation.end()
        except BaseException:
            self.undo_feedback()
            raise
        if repeated >= 0:
            raise UsageError(
                f"{self}: {self.entries[repeated]} was ready twice in one step, and may have been "
                "averaged with its first values; call begin() before each time"
            )

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Compare values that should be equal on all ranks, in every `check_same`-th step.

        Every rank calls it between two steps with the same names: weights, the state of an
        optimizer, numbers. Costs a pass over memory and a small all-gather in these steps.

        Args:
            values: by name: arrays or tensors in host memory, numbers, strings, lists of these.

        Raises:
            UsageError: values differ; raised on every rank, with the first difference and the
                ranks that hold each value. The group is usable. Or a value is of another type, or
                not contiguous: raised on this rank alone, before anything is sent.
            ShoalError: as for every call of the group.
        """
        self._same.compare(values.items(), self._departures.n_steps)

    # Residuals of `compress`.

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the residuals after the last ended step, for `load_state_dict`.

        Every rank has its own residuals, and saves them. {} if `compress` keeps no residuals.
        """
        if self._feedback is None:
            return {}
        return {"n_steps": self._feedback.n_steps, "residuals": self._feedback.residuals()}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load what `state_dict` returned, between two steps; every rank calls it.

        Args:
            strict: raise if the residuals belong to other arrays. If False, load the residuals that
                fit and drop the others, with one line in the log.

        Raises:
            UsageError: a step is under way, `state` is no mapping, the residuals belong to other
                arrays (the text names them), or `compress` keeps no residuals. Nothing has changed.
        """
        if self.is_under_way:
            raise UsageError(f"{self}: load_state_dict within a step; call wait() first")
        if not isinstance(state, Mapping):
            raise UsageError(f"{self}: load_state_dict takes a result of state_dict, got {state!r}")
        if self._feedback is not None:
            residuals, n_steps = state.get("residuals", {}), int(state.get("n_steps", 0))
            self._feedback.load(residuals, n_steps, strict=strict, owner=str(self))
            self._forget_kept_back()
        elif state:
            raise UsageError(f"{self} keeps no residuals: pass compress=ErrorFeedback(...)")

    def end_feedback(self) -> None:
        """Keep the residuals of a step that failed on this rank but ended on another."""
        if self._feedback is not None:
            self._feedback.end()

    def undo_feedback(self) -> None:
        """Restore the residuals from before the last step, because its averages are not used."""
        if self._feedback is not None:
            self._feedback.undo()
            self._forget_kept_back()

    def scale_feedback(self, factor: float) -> None:
        """Set the factor by which the caller multiplies its values; 0 leaves the values out."""
        if self._feedback is not None:
            self._feedback.factor = factor

    def _forget_kept_back(self) -> None:
        """Number the next step 1, in which reducers drop the values that they kept back."""
        self._departures.subject.step = int(self._is_open and self._departures.is_reserved)

    # Results and state.

    @property
    def open_calls(self) -> set[int]:
        """The numbers of this step's calls that are still to be made; a live set."""
        return self._departures.open

    @property
    def times(self) -> deque[StepTimes]:
        """The times of the last ended steps, the oldest first."""
        return self.log.kept

    def not_ready(self) -> list[int]:
        """Return the indices of the arrays that are not ready since `begin`."""
        n_entries, is_counted = len(self.entries), self.countdown.is_counted
        if self.countdown.n_counted == n_entries:
            return []
        return [index for index in range(n_entries) if not is_counted(index)]

    def report(self, *, alone: bool = False) -> AveragingReport:
        """Report where the time of the last steps went: `print` it, or write it as JSON or a trace.

        Every rank calls it at the same place among its steps: a small all-gather finds the slowest
        rank. If a rank does not call it, the others raise `TimedOut`, as for any call.

        Args:
            alone: contact no other rank; for calls on one rank only, or after the group has ended.

        Raises:
            ShoalError: as for every call of the group, which has ended. Not with `alone`.
        """
        now = self._times() if self._is_open else None
        missing = [self.entries[i].name for i in self.not_ready()] if self._is_open else []
        return report_on(self.group, self.name, [*self.times], now, missing, alone=alone)

    def index(self, array: str | int) -> int:
        """Return the index of an array, given its name or index; UsageError for unknown arrays."""
        found = self._indices.get(array, -1) if isinstance(array, str) else operator.index(array)
        if not 0 <= found < len(self.entries):
            raise UsageError(f"{self}: there is no array {array!r}")
        return found

    def span(self, array: str | int) -> BufferView:
        """Return the memory of an array, valid until the next `begin`."""
        return self._memory.span(self.index(array))

    @property
    def memory(self) -> Any:
        """The bytes of all arrays, with Python's buffer interface; always the same object."""
        return self._memory.data

    def __str__(self) -> str:
        return f"{self.group}, {self.name}"

    def _lay_out(self, layout: Layout) -> None:
        for old in self.arrays.values():
            if hasattr(old, "flags"):
                old.flags.writeable = False  # its memory belongs to other arrays from now on
        self.layout = self._memory.layout = layout
        self.log.lay_out(len(layout.buffers))
        self.countdown.lay_out(layout.buffers_of, len(layout.buffers))
        self.countdown.paused = True
        self._memory.clear_padding()
        self._departures.lay_out(layout, self._memory)
        if self._feedback is not None:
            self._feedback.lay_out(layout, self.memory)
        if self._preparation is not None:
            self._preparation.lay_out(layout, self.memory)
        arrays = numpy_arrays(self.memory, layout)
        self.arrays = arrays or {entry.name: self.span(entry.name) for entry in self.entries}

    def _times(self, wait_ns: int = 0, end_ns: int = 0) -> StepTimes:
        calls = self._departures.times()
        return self.log.under_way(self.layout, self.countdown, calls, wait_ns, end_ns)
