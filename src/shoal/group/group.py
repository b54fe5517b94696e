"""Groups of ranks and their collectives.

`form` (form.py) makes the world group; `Group.subgroup` makes smaller groups from it without
sending a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.codec import parse_wire
from shoal.dtypes import Op, parse_op
from shoal.group.buffers import BlockBuffers, span_of
from shoal.group.members import Members

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.codec import Codec
    from shoal.group.calls import CallOptions
    from shoal.group.work import Work


class Group(Members):
    """A group of ranks and its collectives.

    Every rank makes the same calls in the same order, or gives them the same names.

    Every call takes these keywords:
        name: matches the call with the other ranks' calls of this name; calls of one name, and
            calls without a name, match by their order. Names are never forgotten: reuse a few.
        number: a number from `reserve`, instead of a name: calls of one number match.
        subject: the purpose of the call (`Subject.of`), if ranks must agree on it.
        timeout_s: seconds until the call fails, also if no thread waits; None takes the group's.
        async_op: return a `Work` at once, and work on the call in the background.
        work: return a `Work` at once; the work begins in its `wait()`.

    all_reduce and reduce_scatter also take `wire`, the encoding of elements between hosts. "bf16"
    and "fp16" round float32 to 16 bits, "mxfp8", "mxint8" and "mxfp4" to 8.25 or 4.25, for sum and
    avg of float32 only. Sums are folded in float32, and every rank ends with the same bits
    (docs/wire.md lists the errors). "identity" sends elements as they are. None takes the group's
    wire for sums of 64 KiB or more that can use it, else "identity"; for reduce_scatter the block
    of a rank counts. all_gather takes `wire` too.

    Without async_op and work a call waits for the result and returns None. Buffers are anything
    that `span_of` takes: contiguous CPU memory with elements of a `DType`. They are borrowed until
    the call is done: do not write to them, nor read results, before that.

    Every call raises:
        UsageError: bad arguments: nothing was sent, and the group is usable. Or the ranks made
            different calls, or gave lengths that do not match: the group has ended on every rank,
            and buffers may be partly folded.
        PeerLost: a rank is gone, and the group has ended; `shrink` returns the survivors' group.
            Buffers are partly folded.
        TimedOut: the deadline passed, and the group has ended on every rank. Buffers are partly
            folded.
        Closed: the group was closed here, or aborted on any rank.
        ShoalError: a machine has no memory left, and the group has ended.
        TypeError: an unknown keyword. Nothing was sent.
        KeyboardInterrupt: the call goes on, and its buffers stay borrowed.
    """

    def begin(self) -> None:
        """Called when the group has formed. If it raises, the group is closed."""

    # Numbers.

    def reserve(self, count: int) -> range:
        """Return the numbers of the next `count` calls without names, to use later in any order.

        Every rank reserves the same count, in the same place among its calls, and passes them as
        `number=` in any order. Each is for one call; all ranks must `skip` a number that no rank
        will use. Nothing is sent.

        Args:
            count: up to 2,048 (`numbers.MOST_APART`), the most that calls may be out of order: a
                call that is further ahead of an open number raises UsageError.

        Raises:
            UsageError: `count` is out of range or not a whole number, or more than 4,096 numbers
                would be open. Nothing was reserved.
        """
        return self._numbers.reserve(count)

    def skip(self, number: int) -> None:
        """Give up a reserved number; every rank does so. Sends nothing.

        Raises UsageError if the number is not reserved, or was used or skipped.
        """
        self._numbers.skip(number)

    # Collectives.

    def all_reduce(
        self,
        data: Any,
        op: Op | str = Op.SUM,
        *,
        wire: str | Codec | None = None,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """Fold `data` over all ranks, in place: the same bits on every rank.

        Args:
            data: any number of elements in any shape; the same number and type on every rank.
            op: sum, avg, product, min, max, band, bor or bxor; avg of integers truncates toward 0.
                UsageError if the element type does not support it.
            wire: "bf16", "fp16", "mxfp8", "mxint8", "mxfp4", "identity" or None, see `Group`.
        """
        span = span_of(data)
        key = ("all_reduce", span.dtype, op, span.n_elems, wire)
        plan = self._plans.get(key) or self._plan(
            *(key, span.dtype, span.n_elems, parse_op(op)),
            wire=wire,
            subject=how.get("subject", 0),
        )
        return self._start_in_place(plan, span, how)

    def broadcast(self, data: Any, root: int = 0, **how: Unpack[CallOptions]) -> Work | None:
        """Overwrite `data` with the data of rank `root`.

        Args:
            data: the same number and type of elements on every rank; at the root it is only read.
        """
        self._check_rank(root, "root")
        span = span_of(data, writable=self.rank != root)
        key = ("broadcast", span.dtype, root, span.n_elems)
        plan = self._plans.get(key) or self._plan(key, span.dtype, span.n_elems, root=root)
        return self._start_in_place(plan, span, how)

    def reduce(
        self, data: Any, root: int = 0, op: Op | str = Op.SUM, **how: Unpack[CallOptions]
    ) -> Work | None:
        """Fold `data` over all ranks into the data of rank `root`; other ranks' data is only read.

        Args:
            data, op: as for `all_reduce`.
        """
        self._check_rank(root, "root")
        span = span_of(data, writable=root == self.rank)
        key = ("reduce", span.dtype, op, span.n_elems, root)
        plan = self._plans.get(key) or self._plan(key, span.dtype, span.n_elems, parse_op(op), root)
        return self._start_in_place(plan, span, how)

    def all_gather(
        self,
        outputs: Any,
        data: Any,
        *,
        wire: str | Codec | None = None,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """Collect every rank's `data` in `outputs`, in rank order: the same bits on every rank.

        Args:
            outputs: one buffer of size * n elements, or `size` buffers, whose lengths may differ
                and are the same on every rank; written.
            data: as long as this rank's block of `outputs`, which it may be; read.
            wire: for float32, the encoding of elements between hosts. If the ranks are on several
                hosts, this rank's own block of `outputs` is rounded too, before the call begins.
                None: "identity", whatever the group's wire is.
        """
        span = span_of(data, writable=False)
        blocks = self._blocks("outputs", outputs, writable=True)
        self._check_own("outputs", blocks, "data", span)
        self._check_apart("outputs", blocks, "data", BlockBuffers((span,), (span.n_elems,)))
        codec = parse_wire("identity" if wire is None else wire)
        if blocks.even:
            key = ("all_gather", span.dtype, codec, span.n_elems)
            plan = self._plans.get(key) or self._plan(key, span.dtype, span.n_elems, wire=codec)
        else:
            plan = self._uneven_plan("all_gather", span.dtype, blocks=blocks.lengths, wire=codec)
        if codec.is_narrow:
            span = self._rounded_into(blocks.block(self.rank), span, codec)
        return self._start_between(plan, (span,), blocks.spans, how)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Any,
        op: Op | str = Op.SUM,
        *,
        wire: str | Codec | None = None,
        **how: Unpack[CallOptions],
    ) -> Work | None:
        """Fold block r of every rank's `inputs` into the `output` of rank r.

        Args:
            output: as long as this rank's block of `inputs`, which it may be; written.
            inputs: one buffer of size * n elements, or `size` buffers, whose lengths may differ
                and are the same on every rank; never written.
            op, wire: as for `all_reduce`.
        """
        span = span_of(output)
        blocks = self._blocks("inputs", inputs, writable=False)
        self._check_own("inputs", blocks, "output", span)
        self._check_apart("output", BlockBuffers((span,), (span.n_elems,)), "inputs", blocks)
        if blocks.even:
            key = ("reduce_scatter", span.dtype, op, span.n_elems, wire)
            plan = self._plans.get(key) or self._plan(
                key, span.dtype, span.n_elems, parse_op(op), wire=wire
            )
        else:
            plan = self._uneven_plan(
                "reduce_scatter", span.dtype, parse_op(op), blocks=blocks.lengths, wire=wire
            )
        return self._start_between(plan, blocks.spans, (span,), how)

    def gather(
        self, outputs: Any, data: Any, root: int = 0, **how: Unpack[CallOptions]
    ) -> Work | None:
        """Collect every rank's `data` in the `outputs` of rank `root`, in rank order.

        Args:
            outputs: at the root one buffer of size * n elements, or `size` buffers of n; written.
                None on the other ranks.
            data: n elements, the same number and type on every rank; read. At the root it may be
                its own block of `outputs`.
        """
        span = span_of(data, writable=False)
        spans = self._at_root("outputs", outputs, "data", span, root)
        key = ("gather", span.dtype, None, span.n_elems, root)
        plan = self._plans.get(key) or self._plan(key, span.dtype, span.n_elems, root=root)
        return self._start_between(plan, (span,), spans, how)

    def scatter(
        self, output: Any, inputs: Any, root: int = 0, **how: Unpack[CallOptions]
    ) -> Work | None:
        """Overwrite the `output` of rank r with block r of the `inputs` of rank `root`.

        Args:
            output: n elements, the same number and type on every rank; written. At the root it may
                be its own block of `inputs`.
            inputs: at the root one buffer of size * n elements, or `size` buffers of n; never
                written. None on the other ranks.
        """
        span = span_of(output)
        spans = self._at_root("inputs", inputs, "output", span, root)
        key = ("scatter", span.dtype, None, span.n_elems, root)
        plan = self._plans.get(key) or self._plan(key, span.dtype, span.n_elems, root=root)
        return self._start_between(plan, spans, (span,), how)

    def all_to_all(self, outputs: Any, inputs: Any, **how: Unpack[CallOptions]) -> Work | None:
        """Overwrite block s of the `outputs` of rank r with block r of the `inputs` of rank s.

        Args:
            outputs: one buffer of size * n elements, or `size` buffers whose lengths may differ,
                also from rank to rank; written. Block s must be as long as rank s's input for this
                rank; else the group ends on every rank with a UsageError that names both, and other
                blocks may have been written.
            inputs: likewise; never written. This rank's own block may be the one of `outputs`.

        If `SHOAL_ALGO` or a tuning file names bruck, all ranks must give lists, or none.
        """
        written = self._blocks("outputs", outputs, writable=True)
        read = self._blocks("inputs", inputs, writable=False)
        self._check_own("outputs", written, "own input", read.block(self.rank))
        self._check_apart("outputs", written, "inputs", read)
        dtype, n_elems = read.spans[0].dtype, read.lengths[0]
        if len(written.spans) == len(read.spans) == 1:
            key = ("all_to_all", dtype, None, n_elems)
            plan = self._plans.get(key) or self._plan(key, dtype, n_elems)
        else:
            plan = self._uneven_plan("all_to_all", dtype, sent=read.lengths, taken=written.lengths)
        return self._start_between(plan, read.spans, written.spans, how)

    def barrier(self, **how: Unpack[CallOptions]) -> Work | None:
        """Return when every rank has called it."""
        token = span_of(bytearray(1))
        key = ("barrier", token.dtype)
        plan = self._plans.get(key) or self._plan(key, token.dtype, 1, Op.BOR)
        return self._start_in_place(plan, token, how)

    def send(self, data: Any, to: int, tag: int = 0, **how: Unpack[CallOptions]) -> Work | None:
        """Send `data` to rank `to`; messages of up to 64 KiB may return before they are received.

        A message takes neither `name`, `number` nor `subject`.

        Args:
            data: read. The receiver passes the same number and type of elements; else the group
                ends on every rank with UsageError, which a send that has returned does not see.
            to: another rank.
            tag: any 64-bit integer; messages of one tag between two ranks match in order. Tags are
                never forgotten: reuse a few.
        """
        return self._message("send", data, to, tag, how)

    def recv(
        self, data: Any, source: int | None = None, tag: int = 0, **how: Unpack[CallOptions]
    ) -> Work | None:
        """Overwrite `data` with the next unreceived send of this tag.

        Receives of one tag take messages in the order in which they are called.

        Args:
            data: as many elements, and of the same type, as the sender passes; written.
            source: another rank; None takes the first message from any rank, which `Work.source`
                names.
        """
        return self._message("recv", data, source, tag, how)
