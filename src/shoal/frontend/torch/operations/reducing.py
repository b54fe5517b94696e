"""The collectives that fold: all_reduce, reduce, reduce_scatter, each in all of torch's forms."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from shoal.frontend.torch.operations.agreeing import agree
from shoal.frontend.torch.operations.calls import Tensors, listed, options_of
from shoal.frontend.torch.operations.checks import Checks
from shoal.frontend.torch.reduce_ops import fold_of
from shoal.frontend.torch.spans import Spans
from shoal.frontend.torch.sparse import all_reduce_sparse
from shoal.frontend.torch.work import NO_TIMEOUT, FinishedWork, PendingWork, aside


class Reducing(Checks):
    """Collectives that fold."""

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
            opts = options_of(AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensor = self._only(tensors, "all_reduce")
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        spans = Spans(self.describe, "all_reduce", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        call = spans.updated(tensor, factor), fold
        return self._run(self._group.all_reduce, [call], opts, tensors, spans)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        """Fold several tensors, each over all ranks, in place.

        Tensors that share memory are folded as they were before the call; what the last of them
        comes to stays. That is how Gloo does it.
        """
        opts = opts or AllreduceCoalescedOptions()
        self._check_some(tensors, "all_reduce_coalesced")
        spans = Spans(self.describe, "all_reduce_coalesced", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        calls = [(span, fold) for span in spans.updated_apart(tensors, factor)]
        return self._run(self._group.all_reduce, calls, opts, tensors, spans)

    def allreduce_sparse(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Sum one COO tensor over all ranks, in place; every rank may have other indices."""
        opts = opts or AllreduceOptions()
        tensor = self._only(tensors, "all_reduce")
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise self._usage_error("all_reduce", "of sparse tensors takes ReduceOp.SUM only")
        self._n_calls += 1
        given = opts.timeout
        timeout_s = given.total_seconds() if given > NO_TIMEOUT else self._timeout_s
        if self._agrees:
            agree(self._group, "all_reduce of a sparse tensor", [()], timeout_s)
        # Named, so that no other call of this group can come in between on some ranks only.
        name = f"all_reduce_sparse/{self._n_calls % 64}"
        spans = Spans(self.describe, "all_reduce", folds=True)
        add_up = functools.partial(
            all_reduce_sparse, self._group, tensor, spans, name=name, timeout_s=timeout_s
        )

        def go() -> dist.Work:
            if opts.asyncOp or self._coalesced is not None:
                return self._pending(PendingWork([aside(add_up)], tensors))
            add_up()
            return FinishedWork(tensors)

        return self._recordable("sparse_all_reduce", go)

    def reduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        op: dist.ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Fold one tensor over all ranks into the root's; those of the others stay as they are."""
        if not isinstance(opts, ReduceOptions):
            chosen = root if opts is None else opts
            opts = options_of(ReduceOptions, timeout, rootRank=chosen, reduceOp=op)
        tensors = listed(tensors)
        tensor = self._only(tensors, "reduce")
        self._check_rank(opts.rootRank, "reduce", "root")
        spans = Spans(self.describe, "reduce", folds=True)
        fold, factor = fold_of(opts.reduceOp)
        written = self._group.rank == opts.rootRank
        span = spans.updated(tensor, factor) if written else spans.read(tensor, factor)
        call = span, opts.rootRank, fold
        return self._run(self._group.reduce, [call], opts, tensors, spans)

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
            opts = options_of(ReduceScatterOptions, timeout, reduceOp=chosen)
        outputs, blocks = listed(outputs), self._own_list(inputs, "reduce_scatter")
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
        self._check_calls_apart("reduce_scatter", [((out,), source) for out, source, _ in calls])
        return self._run(self._group.reduce_scatter, calls, opts, outputs, spans)
