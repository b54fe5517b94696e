"""The collectives that only move: broadcast, all_gather, gather, scatter and all_to_all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from shoal.frontend.torch.operations.calls import Tensors, listed, options_of
from shoal.frontend.torch.operations.checks import Checks
from shoal.frontend.torch.spans import Spans

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from shoal.group.buffers import Span


class Moving(Checks):
    """Collectives that only move."""

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
            opts = options_of(BroadcastOptions, timeout, rootRank=chosen)
        tensors = listed(tensors)
        spans = Spans(self.describe, "broadcast", folds=False)
        call = spans.updated(self._only(tensors, "broadcast")), opts.rootRank
        return self._run(self._group.broadcast, [call], opts, tensors, spans)

    # ---- everyone's tensor to everyone ----

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
            opts = options_of(AllgatherOptions, timeout if opts is None else opts)
        one = self._only(listed(inputs), "all_gather")
        return self._all_gather_lists([(self._own_list(outputs, "all_gather"), one)], opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Do several of `allgather`; `outputs[rank][i]` becomes rank's i-th input."""
        self._check_some(inputs, "all_gather_coalesced")
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
        self._check_calls_apart("all_gather", [((whole,), source) for whole, source in calls])
        opts = opts or AllgatherOptions()
        return self._run(self._group.all_gather, calls, opts, outputs, spans)

    def _all_gather_lists(
        self, calls: Sequence[tuple[Tensors, torch.Tensor]], opts: AllgatherOptions
    ) -> dist.Work:
        spans = Spans(self.describe, "all_gather", folds=False)
        arguments: list[tuple[list[Span], Span]] = []
        for outputs, one in calls:
            self._check_blocks("all_gather", "outputs", outputs, one)
            places = [spans.written(output) for output in outputs]
            self._check_apart("all_gather", "outputs", places)
            own = places[self._group.rank].address
            arguments.append((places, spans.read_beside(one, places, own)))
        self._check_calls_apart("all_gather", arguments)
        results = [output for outputs, _ in calls for output in outputs]
        return self._run(self._group.all_gather, arguments, opts, results, spans)

    # ---- between the root and everyone ----

    def gather(
        self,
        outputs: list[Tensors] | Tensors,
        inputs: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give the root the tensors of all ranks, one output for each."""
        if not isinstance(opts, GatherOptions):
            opts = options_of(GatherOptions, timeout, rootRank=root if opts is None else opts)
        one = self._only(listed(inputs), "gather")
        blocks = self._roots_list(outputs, opts.rootRank, "gather", "outputs")
        spans = Spans(self.describe, "gather", folds=False)
        if blocks is None:
            call = None, spans.read(one), opts.rootRank
            return self._run(self._group.gather, [call], opts, [], spans)
        self._check_blocks("gather", "outputs", blocks, one)
        places = [spans.written(block) for block in blocks]
        self._check_apart("gather", "outputs", places)
        source = spans.read_beside(one, places, places[opts.rootRank].address)
        return self._run(self._group.gather, [(places, source, opts.rootRank)], opts, blocks, spans)

    def gather_single(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: GatherOptions | None = None,
    ) -> dist.Work:
        """Give the root the tensors of all ranks, one after the other in one output."""
        opts = opts or GatherOptions()
        root = opts.rootRank
        self._check_rank(root, "gather", "root")
        spans = Spans(self.describe, "gather", folds=False)
        if self._group.rank != root:
            call = None, spans.read(input), root
            return self._run(self._group.gather, [call], opts, [], spans)
        if output is None:
            raise self._usage_error("gather", "takes an output here: this rank is the root")
        self._check_whole("gather", "output", output, input)
        whole = spans.written(output)
        source = spans.read_beside(input, [whole], whole.address + root * input.nbytes)
        return self._run(self._group.gather, [(whole, source, root)], opts, [output], spans)

    def scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: list[Tensors] | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give rank r the r-th of the root's inputs."""
        if not isinstance(opts, ScatterOptions):
            opts = options_of(ScatterOptions, timeout, rootRank=root if opts is None else opts)
        outputs = listed(outputs)
        output = self._only(outputs, "scatter")
        blocks = self._roots_list(inputs, opts.rootRank, "scatter", "inputs")
        spans = Spans(self.describe, "scatter", folds=False)
        call: tuple[Any, ...]
        if blocks is None:
            call = spans.written(output), None, opts.rootRank
        else:
            self._check_blocks("scatter", "inputs", blocks, output)
            sources = [spans.read(block) for block in blocks]
            place = spans.written_beside(output, sources, sources[opts.rootRank].address)
            call = place, sources, opts.rootRank
        return self._run(self._group.scatter, [call], opts, outputs, spans)

    # ---- everyone to everyone, to each something else ----

    def alltoall(
        self,
        outputs: Tensors,
        inputs: Tensors,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give rank r the r-th input; the r-th output is what rank r gives. Lengths may differ."""
        if not isinstance(opts, AllToAllOptions):
            opts = options_of(AllToAllOptions, timeout if opts is None else opts)
        self._check_some([*outputs, *inputs], "all_to_all")
        self._check_count("all_to_all", "outputs", outputs)
        self._check_count("all_to_all", "inputs", inputs)
        self._check_same_dtype("all_to_all", [*outputs, *inputs])
        rank = self._group.rank
        if outputs[rank].numel() != inputs[rank].numel():
            why = f"gives itself {inputs[rank].numel()} elements and has room for "
            raise self._usage_error("all_to_all", f"{why}{outputs[rank].numel()}")
        spans = Spans(self.describe, "all_to_all", folds=False)
        places = [spans.written(output) for output in outputs]
        self._check_apart("all_to_all", "outputs", places)
        sources = spans.read_all_beside(inputs, places, rank)
        return self._run(self._group.all_to_all, [(places, sources)], opts, outputs, spans)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Do `alltoall` with the rows of two tensors; no splits at all share them out evenly."""
        if not isinstance(opts, AllToAllOptions):
            opts = options_of(AllToAllOptions, timeout if opts is None else opts)
        self._check_same_dtype("all_to_all", [output, input])
        self._check_contiguous("all_to_all_single", output=output, input=input)
        self._check_splits("all_to_all", "output", output, output_splits)
        self._check_splits("all_to_all", "input", input, input_splits)
        self._check_own_rows(output, input, output_splits, input_splits)
        spans = Spans(self.describe, "all_to_all", folds=False)
        place = spans.written(output)
        source = spans.read_beside(input, [place], -1)
        call: tuple[Any, Any] = place, source
        if output_splits or input_splits:
            call = (
                _parts(place, output, self._n_elems(output, output_splits)),
                _parts(source, input, self._n_elems(input, input_splits)),
            )
        return self._run(self._group.all_to_all, [call], opts, [output], spans)

    def _check_own_rows(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        rank = self._group.rank
        room = self._n_elems(output, output_splits)[rank]
        n_given = self._n_elems(given, input_splits)[rank]
        if room != n_given:
            why = f"gives itself {n_given} elements and has room for {room}"
            raise self._usage_error("all_to_all", why)

    def _n_elems(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """How many elements each rank's rows have."""
        size, n_rows = self._group.size, tensor.shape[0]
        n_row = tensor.numel() // n_rows if n_rows else 0
        return [n * n_row for n in splits] if splits else [tensor.numel() // size] * size


def _parts(span: Span, tensor: torch.Tensor, n_elems: Sequence[int]) -> list[Span]:
    """The memory of a tensor, cut into pieces of so many of its elements."""
    # Elements of a type that shoal does not know travel as bytes: several to one of the tensor's.
    scale = span.n_elems // tensor.numel() if tensor.numel() else 1
    ends = itertools.accumulate(n_elems, initial=0)
    item = tensor.element_size()
    return [
        span._replace(address=span.address + begin * item, n_elems=n * scale)
        for begin, n in zip(ends, n_elems, strict=False)
    ]
