"""torch's collectives as calls on a shoal group: written once, for every version of torch.

torch 2.11 to 2.13 reach them through a ProcessGroup, later ones through a Backend, under names that
changed on the way; `process_group.py` has both classes. Each operation takes lists, as torch gives
them, checks what this rank alone can see, and starts one collective per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from shoal.errors import UsageError
from shoal.frontend.torch.reduce_ops import fold_of
from shoal.frontend.torch.spans import Spans
from shoal.frontend.torch.unsupported import NotThereYet
from shoal.frontend.torch.work import NO_TIMEOUT, FinishedWork, PendingWork

if TYPE_CHECKING:
    from shoal.buffers import Span
    from shoal.group import Group
    from shoal.work import Work

Tensors = list[torch.Tensor]

_NO_TENSORS: Final[Tensors] = []


class Operations(NotThereYet):
    """The operations of one group.

    Threads: any, as long as every rank issues the same collectives in the same order.

    Args:
        group: owned: shutdown closes it.
        timeout: of every call that does not bring its own.
    """

    def __init__(self, group: Group, timeout: timedelta) -> None:
        self._group = group
        self._timeout_s = timeout.total_seconds()
        self._n_calls = 0

    @property
    def group(self) -> Group:
        """The shoal group underneath."""
        return self._group

    # ---- collectives that fold ----

    def allreduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: dist.ReduceOp | None = None,
    ) -> dist.Work:
        """Fold one tensor over all ranks, in place."""
        if not isinstance(opts, AllreduceOptions):
            opts = _options(AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        tensors = _listed(tensors)
        spans = Spans(self.describe, "all_reduce", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        call = spans.updated(self._only(tensors, "all_reduce"), factor), fold
        return self._run(self._group.all_reduce, [call], opts, tensors, spans)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        """Fold several tensors, each over all ranks, in place."""
        opts = opts or AllreduceCoalescedOptions()
        spans = Spans(self.describe, "all_reduce_coalesced", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        calls = [(spans.updated(tensor, factor), fold) for tensor in tensors]
        return self._run(self._group.all_reduce, calls, opts, tensors, spans)

    def reduce_scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: list[Tensors] | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: dist.ReduceOp | None = None,
    ) -> dist.Work:
        """Fold the r-th inputs of all ranks into rank r's output."""
        if not isinstance(opts, ReduceScatterOptions):
            chosen = op if opts is None else opts
            opts = _options(ReduceScatterOptions, timeout, reduceOp=chosen)
        outputs, blocks = _listed(outputs), self._own_list(inputs, "reduce_scatter")
        output = self._only(outputs, "reduce_scatter")
        self._check_blocks("reduce_scatter", "inputs", blocks, output)
        spans = Spans(self.describe, "reduce_scatter", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        sources = [spans.read(block, factor) for block in blocks]
        own = sources[self._group.rank].address
        call = spans.written_beside(output, sources, own), sources, fold
        return self._run(self._group.reduce_scatter, [call], opts, outputs, spans)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: ReduceScatterOptions | None = None,
    ) -> dist.Work:
        """Fold the r-th parts of all ranks' inputs into rank r's output."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Do several of `reduce_scatter_single`."""
        opts = opts or ReduceScatterOptions()
        spans = Spans(self.describe, "reduce_scatter", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        calls = []
        for output, whole in self._pairs("reduce_scatter", outputs, inputs):
            self._check_whole("reduce_scatter", "input", whole, output)
            source = spans.read(whole, factor)
            own = source.address + self._group.rank * output.nbytes
            calls.append((spans.written_beside(output, [source], own), source, fold))
        return self._run(self._group.reduce_scatter, calls, opts, outputs, spans)

    # ---- collectives that only move ----

    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give every rank the root's tensor."""
        if not isinstance(opts, BroadcastOptions):
            chosen = root if opts is None else opts
            opts = _options(BroadcastOptions, timeout, rootRank=chosen)
        tensors = _listed(tensors)
        spans = Spans(self.describe, "broadcast", folds=False)
        call = spans.updated(self._only(tensors, "broadcast")), opts.rootRank
        return self._run(self._group.broadcast, [call], opts, tensors, spans)

    def allgather(
        self,
        outputs: list[Tensors] | Tensors,
        inputs: Tensors | torch.Tensor,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give every rank the tensors of all ranks, one output for each."""
        if not isinstance(opts, AllgatherOptions):
            opts = _options(AllgatherOptions, timeout if opts is None else opts)
        one = self._only(_listed(inputs), "all_gather")
        return self._all_gather_lists([(self._own_list(outputs, "all_gather"), one)], opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Do several of `allgather`; `outputs[rank][i]` becomes rank's i-th input."""
        if len(outputs) != self._group.size or any(len(row) != len(inputs) for row in outputs):
            raise self._usage_error(
                "all_gather_coalesced",
                f"takes {self._group.size} lists of outputs, one for each rank, each as long as "
                f"the list of inputs, which has {len(inputs)}",
            )
        calls = [([row[i] for row in outputs], one) for i, one in enumerate(inputs)]
        return self._all_gather_lists(calls, opts or AllgatherOptions())

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Give every rank the tensors of all ranks, one after the other in one output."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Do several of `all_gather_single`."""
        spans = Spans(self.describe, "all_gather", folds=False)
        calls = []
        for output, one in self._pairs("all_gather", outputs, inputs):
            self._check_whole("all_gather", "output", output, one)
            whole = spans.written(output)
            own = whole.address + self._group.rank * one.nbytes
            calls.append((whole, spans.read_beside(one, [whole], own)))
        opts = opts or AllgatherOptions()
        return self._run(self._group.all_gather, calls, opts, outputs, spans)

    def barrier(
        self,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Wait until every rank has come here."""
        if not isinstance(opts, BarrierOptions):
            opts = _options(BarrierOptions, timeout if opts is None else opts)
        return self._run(self._group.barrier, [()], opts, _NO_TENSORS, None)

    # ---- from one rank to another ----

    # torch does not say whether its caller waits at once (send) or at leisure (isend).

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> dist.Work:  # noqa: N803 - torch's
        """Send one tensor to a rank of this group; that rank receives it under the same tag."""
        spans = Spans(self.describe, "send", folds=False)
        span = spans.read(self._only(tensors, "send"))
        work = self._group.send(span, dstRank, tag, timeout_s=self._timeout_s, async_op=True)
        return PendingWork([cast("Work", work)], tensors)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> dist.Work:  # noqa: N803 - torch's
        """Receive one tensor from a rank of this group."""
        spans = Spans(self.describe, "recv", folds=False)
        span = spans.written(self._only(tensors, "recv"))
        work = self._group.recv(span, srcRank, tag, timeout_s=self._timeout_s, async_op=True)
        copy_back = spans.copy_back if spans.has_stand_ins else None
        return PendingWork([cast("Work", work)], tensors, copy_back, srcRank)

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on, give this much time to every call that does not bring its own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Idempotent."""
        self._group.close()

    def abort(self) -> None:
        """End everything in flight on every rank with an error, now."""
        self._group.abort("torch.distributed aborted the process group")

    # ---- what torch asks a group about itself ----

    def getBackendName(self) -> str:  # noqa: N802 - torch looks for this name
        """The name under which the backend was registered."""
        return "shoal"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def supports_tensor_alloc(self, device: object) -> bool:
        """Whether tensors for this backend can be had from it."""
        return False

    @property
    def options(self) -> Any:
        """The backend's options, as torch keeps them."""
        options: Any = Backend.Options("shoal", timedelta(seconds=self._timeout_s))
        options.group_name = self._group.name
        return options

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were started."""
        return self._n_calls

    # ---- the way into the group ----

    def _run(
        self,
        start: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        opts: Any,
        tensors: Tensors,
        spans: Spans | None,
    ) -> dist.Work:
        """Start one collective per call, and finish them if the caller is going to wait anyway.

        Args:
            start: a method of the group.
            calls: its arguments.
            opts: any of torch's options.
            tensors: what the Work reports as its result.
        """
        self._n_calls += len(calls)
        timeout = opts.timeout
        # torch's sign for "not given" is a negative one.
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else self._timeout_s
        if opts.asyncOp:
            works = [start(*call, timeout_s=timeout_s, async_op=True) for call in calls]
            copy_back = spans.copy_back if spans is not None and spans.has_stand_ins else None
            return PendingWork(works, tensors, copy_back)
        if len(calls) == 1:
            start(*calls[0], timeout_s=timeout_s)
        else:
            for work in [start(*call, timeout_s=timeout_s, work=True) for call in calls]:
                work.wait()
        if spans is not None:
            spans.copy_back()
        return FinishedWork(tensors)

    def _all_gather_lists(
        self, calls: Sequence[tuple[Tensors, torch.Tensor]], opts: AllgatherOptions
    ) -> dist.Work:
        spans = Spans(self.describe, "all_gather", folds=False)
        arguments: list[tuple[list[Span], Span]] = []
        for outputs, one in calls:
            self._check_blocks("all_gather", "outputs", outputs, one)
            places = [spans.written(output) for output in outputs]
            own = places[self._group.rank].address
            arguments.append((places, spans.read_beside(one, places, own)))
        results = [output for outputs, _ in calls for output in outputs]
        return self._run(self._group.all_gather, arguments, opts, results, spans)

    # ---- what this rank alone can see to be wrong ----

    def _only(self, tensors: Tensors, operation: str) -> torch.Tensor:
        if len(tensors) != 1:
            why = f"takes one tensor per process, not {len(tensors)}"
            raise self._usage_error(operation, why)
        return tensors[0]

    def _own_list(self, lists: list[Tensors] | Tensors, operation: str) -> Tensors:
        """The list for this process: torch wraps it in another, its overloads do not."""
        if not lists or isinstance(lists[0], torch.Tensor):
            return cast("Tensors", lists)
        if len(lists) != 1:
            why = f"takes one list of tensors per process, not {len(lists)}"
            raise self._usage_error(operation, why)
        return lists[0]

    def _pairs(
        self, operation: str, outputs: Tensors, inputs: Tensors
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        if len(outputs) != len(inputs):
            why = f"takes as many outputs as inputs, not {len(outputs)} and {len(inputs)}"
            raise self._usage_error(operation, why)
        return list(zip(outputs, inputs, strict=True))

    def _check_blocks(self, operation: str, side: str, blocks: Tensors, like: torch.Tensor) -> None:
        """The list has a tensor for each rank, all like the one on the other side."""
        if len(blocks) != self._group.size:
            why = f"takes {self._group.size} {side}, one for each rank, not {len(blocks)}"
            raise self._usage_error(operation, why)
        for rank, block in enumerate(blocks):
            if block.dtype != like.dtype or block.numel() != like.numel():
                raise self._usage_error(
                    operation,
                    f"{side}[{rank}] has {_extent(block)} but must have {_extent(like)}, as the "
                    "other side has",
                )

    def _check_whole(
        self, operation: str, side: str, whole: torch.Tensor, block: torch.Tensor
    ) -> None:
        """One tensor has the elements of all ranks, the other those of one."""
        size = self._group.size
        if whole.dtype != block.dtype or whole.numel() != block.numel() * size:
            raise self._usage_error(
                operation,
                f"the {side} has {_extent(whole)} but must have {size} times {_extent(block)}",
            )

    def _usage_error(self, operation: str, why: str) -> UsageError:
        return UsageError(f"{self.describe(operation)} {why}")


def _options(kind: Callable[[], Any], timeout: timedelta | None, **fields: object) -> Any:
    """Options out of what torch's own overloads take instead of them."""
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _extent(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
