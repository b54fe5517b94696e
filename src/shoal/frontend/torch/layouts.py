"""Converts the tensors of torch's operations to the buffers of collectives, and checks them.

The checks raise UsageError for errors that this rank can detect alone, before any byte moves.

Each public function takes the tensors that an operation writes and the tensors that it reads, as
torch passes them, and returns the buffer arguments of each collective to call. `Blocks` are for all
ranks: one tensor for each rank, or one for all ranks; None on ranks other than the root.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.errors import Unsupported
from shoal.frontend.torch.tensor_buffers import describe
from shoal.group.buffers import BufferView, Range, blocks_of, clash

if TYPE_CHECKING:
    from shoal.frontend.torch.tensor_buffers import TensorBuffers

Arguments = tuple[Any, ...]
Tensors = list[torch.Tensor]
OneOrList = torch.Tensor | Tensors
Lists = Tensors | list[Tensors]
Blocks = torch.Tensor | Tensors | None
Pair = tuple[Blocks, torch.Tensor]
View = Callable[[torch.Tensor], BufferView]
Rows = tuple[torch.Tensor, Sequence[int]]  # with the number of rows for each rank; empty: evenly


def no_tensors(_buffers: TensorBuffers, _outputs: None, _inputs: None) -> list[Arguments]:
    """Read and write nothing."""
    return [()]


# ---- in place ----


def one_in_place(buffers: TensorBuffers, tensors: OneOrList, _inputs: None) -> list[Arguments]:
    """Read and write one tensor."""
    return [(buffers.updated(only(buffers, tensors)),)]


def each_in_place(buffers: TensorBuffers, tensors: Tensors, _inputs: None) -> list[Arguments]:
    """Read and write each tensor, with one collective for each."""
    check_some(buffers, tensors)
    views = [buffers.updated(tensor) for tensor in tensors]
    check_apart(buffers, views)
    return [(view,) for view in views]


def root_in_place(buffers: TensorBuffers, tensors: OneOrList, _inputs: None) -> list[Arguments]:
    """Read and write the root's tensor; only read the tensors of other ranks."""
    if buffers.group.rank == buffers.root:
        return one_in_place(buffers, tensors, None)
    tensor = only(buffers, tensors)
    buffers.results.append(tensor)  # torch expects a result on every rank
    return [(buffers.read(tensor),)]


# ---- the blocks of all ranks are written, one is read ----


def gathered_lists(buffers: TensorBuffers, outputs: Lists, inputs: OneOrList) -> list[Arguments]:
    """Write a list of outputs (only at the root, if there is one); read one input."""
    blocks = own_blocks(buffers, "outputs", outputs)
    return _beside(buffers, "output", [(blocks, only(buffers, inputs))])


def gathered_by_rank(
    buffers: TensorBuffers, outputs: list[Tensors], inputs: Tensors
) -> list[Arguments]:
    """Run one collective for each input: the outputs of input i are `outputs[rank][i]`."""
    check_some(buffers, inputs)
    size = buffers.group.size
    if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
        raise buffers.error(
            f"takes {size} lists of outputs, one for each rank, each as long as the list of "
            f"inputs, which has {len(inputs)}"
        )
    return _beside(
        buffers, "output", [([row[i] for row in outputs], one) for i, one in enumerate(inputs)]
    )


def gathered_wholes(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[Arguments]:
    """Run one collective for each pair of an output, with all ranks' blocks, and its input."""
    return _beside(buffers, "output", pairs(buffers, outputs, inputs))


def gathered_whole_at_root(
    buffers: TensorBuffers, output: torch.Tensor | None, given: torch.Tensor
) -> list[Arguments]:
    """Write one output with all ranks' blocks, at the root only; read one input."""
    if buffers.group.rank != buffers.root:
        return _beside(buffers, "output", [(None, given)])
    if output is None:
        raise buffers.error("needs an output on this rank, which is the root")
    return _beside(buffers, "output", [(output, given)])


# ---- the blocks of all ranks are read, one is written ----


def scattered_lists(buffers: TensorBuffers, outputs: OneOrList, inputs: Lists) -> list[Arguments]:
    """Write one output; read a list of inputs (only at the root, if there is one)."""
    blocks = own_blocks(buffers, "inputs", inputs)
    return _beside(buffers, "input", [(blocks, only(buffers, outputs))])


def scattered_wholes(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[Arguments]:
    """Run one collective for each pair of an output and its input, with all ranks' blocks."""
    swapped = [(given, output) for output, given in pairs(buffers, outputs, inputs)]
    return _beside(buffers, "input", swapped)


# ---- the blocks of all ranks on one side, one tensor on the other ----


def _beside(buffers: TensorBuffers, side: str, pairs: Sequence[Pair]) -> list[Arguments]:
    """Return the written and the read buffer of each pair; one may be this rank's own block.

    Args:
        side: the side with the blocks, which are first in a pair: "output" or "input".
    """
    blocks_at = int(side == "input")
    views_of: list[View] = [buffers.written, buffers.read]
    calls: list[Arguments] = []
    for blocks, one in pairs:
        if blocks is not None:
            check_blocks(buffers, side, blocks, one)
        call = [each_block(blocks, views_of[blocks_at]), views_of[1 - blocks_at](one)]
        calls.append(tuple(call[::-1] if blocks_at else call))
    check_apart(buffers, [view for written, _ in calls for view in views_in(written)])
    if len(calls) > 1:
        check_calls_apart(buffers, calls, blocks_at)
    return calls


def views_in(buffer: Any) -> list[BufferView]:
    """Return the views in an argument of a call: a list of blocks, one view, or None."""
    if buffer is None:
        return []
    return buffer if isinstance(buffer, list) else [buffer]


def each_block(blocks: Any, change: Callable[[Any], BufferView]) -> Any:
    """Apply `change` to each block of a list, or to the only one; None stays None."""
    if isinstance(blocks, list):
        return [change(block) for block in blocks]
    return None if blocks is None else change(blocks)


# ---- output r comes from rank r, input r goes to rank r ----


def exchanged_lists(buffers: TensorBuffers, outputs: Tensors, inputs: Tensors) -> list[Arguments]:
    """Write an output and read an input for each rank. Lengths may differ."""
    check_some(buffers, [*outputs, *inputs])
    check_count(buffers, "outputs", outputs)
    check_count(buffers, "inputs", inputs)
    sent, taken = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
    check_exchange(buffers, [*outputs, *inputs], sent, taken)
    written = each_block(outputs, buffers.written)
    check_apart(buffers, written)
    return [(written, each_block(inputs, buffers.read))]


def exchanged_rows(buffers: TensorBuffers, outputs: Rows, inputs: Rows) -> list[Arguments]:
    """Write the rows of one tensor, and read the rows of another."""
    (output, output_splits), (given, input_splits) = outputs, inputs
    taken = split(buffers, "output", output, output_splits)
    sent = split(buffers, "input", given, input_splits)
    check_exchange(buffers, [output, given], sent, taken)
    written, read = buffers.written(output), buffers.read(given)
    if not output_splits and not input_splits:
        return [(written, read)]
    return [(_parts(written, output, taken), _parts(read, given, sent))]


def _parts(view: BufferView, tensor: torch.Tensor, n_elems: Sequence[int]) -> list[BufferView]:
    """Return the memory of a tensor, cut into pieces with these numbers of elements."""
    # Elements of a dtype that shoal does not know are sent as bytes, several for each element.
    scale = view.n_elems // tensor.numel() if tensor.numel() else 1
    ends = itertools.accumulate(n_elems, initial=0)
    item = tensor.element_size()
    return [
        view._replace(address=view.address + begin * item, n_elems=n * scale)
        for begin, n in zip(ends, n_elems, strict=False)
    ]


# ---- checks ----


def only(buffers: TensorBuffers, tensors: OneOrList) -> torch.Tensor:
    """Return the single tensor of a call, which some of torch's callers wrap in a list."""
    if not isinstance(tensors, list):
        return tensors
    if len(tensors) != 1:
        check_some(buffers, tensors)
        raise buffers.error(f"takes one tensor per process, not {len(tensors)}")
    return tensors[0]


def own_blocks(buffers: TensorBuffers, side: str, lists: Lists) -> Tensors | None:
    """Return this rank's tensors for all ranks; None on ranks other than the root.

    Some of torch's callers wrap the list in another.
    """
    blocks = cast("Tensors", lists)
    if lists and not isinstance(lists[0], torch.Tensor):
        if len(lists) != 1:
            raise buffers.error(f"takes one list of tensors per process, not {len(lists)}")
        blocks = lists[0]
    if buffers.root is None or buffers.root == buffers.group.rank:
        return blocks
    if blocks:
        raise buffers.error(f"takes {side} on rank {buffers.root}, the root, but not on this rank")
    return None


def pairs(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each output with its input."""
    if isinstance(outputs, torch.Tensor) or isinstance(inputs, torch.Tensor):
        return [(only(buffers, outputs), only(buffers, inputs))]
    if len(outputs) != len(inputs):
        why = f"takes as many outputs as inputs, not {len(outputs)} and {len(inputs)}"
        raise buffers.error(why)
    check_some(buffers, outputs)
    return list(zip(outputs, inputs, strict=True))


def split(
    buffers: TensorBuffers, side: str, tensor: torch.Tensor, splits: Sequence[int]
) -> list[int]:
    """Return the number of elements of a tensor for each rank.

    The tensor must be contiguous, as for torch's own backends.

    Args:
        splits: the number of rows for each rank; empty: an equal number.
    """
    if not tensor.is_contiguous():
        raise buffers.error(f"takes a contiguous {side}; pass {side}.contiguous()")
    if not tensor.dim():
        raise buffers.error(f"cannot split the {side}: it has no dimensions")
    size, n_rows = buffers.group.size, tensor.shape[0]
    why = f"cannot split the {side}'s {n_rows} rows"
    if not splits:
        if n_rows % size:
            raise buffers.error(f"{why} evenly among {size} ranks")
        return [tensor.numel() // size] * size
    check_count(buffers, f"{side} splits", splits)
    if min(splits) < 0:
        raise buffers.error(f"{why} as {list(splits)}: a count is negative")
    if sum(splits) != n_rows:
        raise buffers.error(f"{why} as {list(splits)}, a total of {sum(splits)}")
    return [n * (tensor.numel() // n_rows) for n in splits] if n_rows else [0] * size


def check_some(buffers: TensorBuffers, tensors: Tensors) -> None:
    """Raise the error that torch's dispatcher raises over Gloo if there is no tensor."""
    if not tensors:
        doing = describe(buffers.group, buffers.operation)
        raise Unsupported(f"{doing} takes at least one tensor, but the list is empty")


def check_count(buffers: TensorBuffers, side: str, blocks: Sequence[object]) -> None:
    """Raise UsageError unless there is one block for each rank."""
    size = buffers.group.size
    if len(blocks) != size:
        raise buffers.error(f"takes {size} {side}, one for each rank, not {len(blocks)}")


def check_blocks(buffers: TensorBuffers, side: str, blocks: OneOrList, like: torch.Tensor) -> None:
    """Raise UsageError unless the blocks of all ranks fit the tensor on the other side.

    Without a root, only this rank's block of a list must have the same length.
    """
    size = buffers.group.size
    if isinstance(blocks, torch.Tensor):
        if blocks.dtype != like.dtype or blocks.numel() != like.numel() * size:
            raise buffers.error(
                f"cannot run: the {side} has {_extent(blocks)} but must have {size} times "
                f"{_extent(like)}"
            )
        return
    check_count(buffers, f"{side}s", blocks)
    for rank, block in enumerate(blocks):
        is_as_long = buffers.root is not None or rank == buffers.group.rank
        if block.dtype != like.dtype or (is_as_long and block.numel() != like.numel()):
            raise buffers.error(
                f"cannot run: {side}s[{rank}] has {_extent(block)} but must have {_extent(like)}, "
                "as the other side has"
            )


def check_exchange(
    buffers: TensorBuffers, tensors: Tensors, sent: Sequence[int], taken: Sequence[int]
) -> None:
    """Raise UsageError unless tensors have one dtype, and this rank's part for itself fits.

    Args:
        sent: the number of elements sent to each rank; `taken`: the room for each rank's elements.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise buffers.error(f"takes tensors of one dtype, not of {names}")
    given, room = sent[buffers.group.rank], taken[buffers.group.rank]
    if given != room:
        raise buffers.error(f"sends {given} elements to its own rank but has room for {room}")


def check_apart(buffers: TensorBuffers, outputs: Sequence[BufferView]) -> None:
    """Raise UsageError if calls would write the same memory twice."""
    found = clash([view.extent for view in outputs], []) if len(outputs) > 1 else None
    if found is not None:
        first, second = sorted(found[:2])
        raise buffers.error(
            f"would write outputs {first} and {second} into the same memory; give each its own "
            "memory"
        )


def check_calls_apart(buffers: TensorBuffers, calls: Sequence[Arguments], blocks_at: int) -> None:
    """Raise UsageError if one of several calls would write memory that it or another reads.

    NOT left to the calls: by then the first one has begun.

    Args:
        calls: the written and the read buffer of each call; the buffer at `blocks_at` has the
            blocks of all ranks. This rank's own block may be the other buffer.
    """
    size, rank = buffers.group.size, buffers.group.rank
    written: list[tuple[int, Range]] = []
    read: list[tuple[int, Range]] = []
    for number, call in enumerate(calls):
        of_blocks = blocks_of(call[blocks_at], size, writable=False).ranges()
        one = call[1 - blocks_at].extent
        outputs, inputs = ([one], of_blocks) if blocks_at else (of_blocks, [one])
        if one == of_blocks[rank]:  # in place
            inputs.remove(one)
        written += [(number, each) for each in outputs]
        read += [(number, each) for each in inputs]
    found = clash([each for _, each in written], [each for _, each in read])
    if found is not None:
        first, second = written[found[0]][0], read[found[1]][0]
        raise buffers.error(
            f"would write output {first} where it reads input {second}; give each its own memory"
        )


def _extent(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
