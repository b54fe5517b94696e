"""How the tensors of torch's operations become the buffers of collectives, checked on the way.

The checks raise UsageError for what this rank alone can see to be wrong, before any byte moves.

Each public function takes what an operation writes and what it reads, as torch gives them, and
returns the buffer arguments of each collective to call. Of these, `blocks` are for all ranks: a
tensor for each, or one tensor of them all; None where only the root has them and this is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.errors import Unsupported
from shoal.frontend.torch.tensor_buffers import describe
from shoal.group.buffers import BufferView, Range, clash

if TYPE_CHECKING:
    from shoal.frontend.torch.tensor_buffers import TensorBuffers

Arguments = tuple[Any, ...]
Tensors = list[torch.Tensor]
OneOrList = torch.Tensor | Tensors
Lists = Tensors | list[Tensors]
Blocks = torch.Tensor | Tensors | None
Rows = tuple[torch.Tensor, Sequence[int]]  # with how many each rank gets; none at all: evenly


def no_tensors(_buffers: TensorBuffers, _outputs: None, _inputs: None) -> list[Arguments]:
    """Nothing is read or written."""
    return [()]


# ---- in place ----


def one_in_place(buffers: TensorBuffers, tensors: OneOrList, _inputs: None) -> list[Arguments]:
    """One tensor is read and written."""
    return [(buffers.updated(only(buffers, tensors)),)]


def each_in_place(buffers: TensorBuffers, tensors: Tensors, _inputs: None) -> list[Arguments]:
    """Each tensor is read and written, by a collective of its own."""
    check_some(buffers, tensors)
    return [(view,) for view in buffers.updated_apart(tensors)]


def root_in_place(buffers: TensorBuffers, tensors: OneOrList, _inputs: None) -> list[Arguments]:
    """The root's tensor is read and written, those of other ranks are only read."""
    if buffers.group.rank == buffers.root:
        return one_in_place(buffers, tensors, None)
    tensor = only(buffers, tensors)
    buffers.results.append(tensor)  # torch wants it everywhere
    return [(buffers.read(tensor),)]


# ---- the blocks of all ranks are written, one is read ----


def gathered_lists(buffers: TensorBuffers, outputs: Lists, inputs: OneOrList) -> list[Arguments]:
    """A list of outputs, at the root if there is one; and one input."""
    blocks = own_blocks(buffers, "outputs", outputs)
    return _gathered(buffers, [(blocks, only(buffers, inputs))])


def gathered_by_rank(
    buffers: TensorBuffers, outputs: list[Tensors], inputs: Tensors
) -> list[Arguments]:
    """A collective for each input: the outputs of the i-th are `outputs[rank][i]`."""
    check_some(buffers, inputs)
    size = buffers.group.size
    if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
        raise buffers.error(
            f"takes {size} lists of outputs, one for each rank, each as long as the list of "
            f"inputs, which has {len(inputs)}"
        )
    return _gathered(buffers, [([row[i] for row in outputs], one) for i, one in enumerate(inputs)])


def gathered_wholes(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[Arguments]:
    """A collective for each output, which is for all ranks, and its input."""
    return _gathered(buffers, pairs(buffers, outputs, inputs))


def gathered_whole_at_root(
    buffers: TensorBuffers, output: torch.Tensor | None, given: torch.Tensor
) -> list[Arguments]:
    """One output for all ranks at the root, whatever the others give for it; and one input."""
    if buffers.group.rank != buffers.root:
        return _gathered(buffers, [(None, given)])
    if output is None:
        raise buffers.error("takes an output here: this rank is the root")
    return _gathered(buffers, [(output, given)])


def _gathered(
    buffers: TensorBuffers, pairs: Iterable[tuple[Blocks, torch.Tensor]]
) -> list[Arguments]:
    """The blocks are written. The input may lie in this rank's own block."""
    calls = []
    arguments: list[Arguments] = []
    for blocks, one in pairs:
        if blocks is None:
            return [(None, buffers.read(one))]
        outputs, own = _views(buffers, "output", blocks, one, buffers.written)
        check_apart(buffers, "outputs", outputs)
        source = buffers.read_beside(one, outputs, own)
        calls.append((outputs, source))
        arguments.append((_argument(blocks, outputs), source))
    check_calls_apart(buffers, calls)
    return arguments


# ---- the blocks of all ranks are read, one is written ----


def scattered_lists(buffers: TensorBuffers, outputs: OneOrList, inputs: Lists) -> list[Arguments]:
    """One output; and a list of inputs, at the root if there is one."""
    blocks = own_blocks(buffers, "inputs", inputs)
    return _scattered(buffers, [(only(buffers, outputs), blocks)])


def scattered_wholes(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[Arguments]:
    """A collective for each output and its input, which is of all ranks."""
    return _scattered(buffers, pairs(buffers, outputs, inputs))


def _scattered(
    buffers: TensorBuffers, pairs: Iterable[tuple[torch.Tensor, Blocks]]
) -> list[Arguments]:
    """The blocks are read. The output may lie in this rank's own block."""
    calls = []
    arguments: list[Arguments] = []
    for one, blocks in pairs:
        if blocks is None:
            return [(buffers.written(one), None)]
        inputs, own = _views(buffers, "input", blocks, one, buffers.read)
        output = buffers.written_beside(one, inputs, own)
        calls.append(([output], inputs[0]))
        arguments.append((output, _argument(blocks, inputs)))
    check_calls_apart(buffers, calls)
    return arguments


def _views(
    buffers: TensorBuffers,
    side: str,
    blocks: OneOrList,
    like: torch.Tensor,
    view: Callable[[torch.Tensor], BufferView],
) -> tuple[list[BufferView], int]:
    """The blocks' memory, and where this rank's own block begins."""
    rank = buffers.group.rank
    if isinstance(blocks, torch.Tensor):
        check_whole(buffers, side, blocks, like)
        whole = view(blocks)
        return [whole], whole.address + rank * like.nbytes
    check_blocks(buffers, f"{side}s", blocks, like)
    views = [view(block) for block in blocks]
    return views, views[rank].address


def _argument(blocks: Blocks, views: list[BufferView]) -> BufferView | list[BufferView]:
    return views[0] if isinstance(blocks, torch.Tensor) else views


# ---- the r-th output comes from rank r, the r-th input goes there ----


def exchanged_lists(buffers: TensorBuffers, outputs: Tensors, inputs: Tensors) -> list[Arguments]:
    """An output and an input for each rank. Lengths may differ."""
    check_some(buffers, [*outputs, *inputs])
    check_count(buffers, "outputs", outputs)
    check_count(buffers, "inputs", inputs)
    sent, taken = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
    check_exchange(buffers, [*outputs, *inputs], sent, taken)
    written = [buffers.written(output) for output in outputs]
    check_apart(buffers, "outputs", written)
    return [(written, buffers.read_all_beside(inputs, written))]


def exchanged_rows(buffers: TensorBuffers, outputs: Rows, inputs: Rows) -> list[Arguments]:
    """The rows of two tensors, which may be the same."""
    (output, output_splits), (given, input_splits) = outputs, inputs
    taken = split(buffers, "output", output, output_splits)
    sent = split(buffers, "input", given, input_splits)
    check_exchange(buffers, [output, given], sent, taken)
    written = buffers.written(output)
    read = buffers.read_beside(given, [written], -1)
    if not output_splits and not input_splits:
        return [(written, read)]
    return [(_parts(written, output, taken), _parts(read, given, sent))]


def _parts(view: BufferView, tensor: torch.Tensor, n_elems: Sequence[int]) -> list[BufferView]:
    """The memory of a tensor, cut into pieces of so many of its elements."""
    # Elements of a type that shoal does not know travel as bytes: several to one of the tensor's.
    scale = view.n_elems // tensor.numel() if tensor.numel() else 1
    ends = itertools.accumulate(n_elems, initial=0)
    item = tensor.element_size()
    return [
        view._replace(address=view.address + begin * item, n_elems=n * scale)
        for begin, n in zip(ends, n_elems, strict=False)
    ]


# ---- checks ----


def only(buffers: TensorBuffers, tensors: Tensors | torch.Tensor) -> torch.Tensor:
    """The one tensor of a call, which torch wraps in a list and some of its overloads do not."""
    if not isinstance(tensors, list):
        return tensors
    if len(tensors) != 1:
        check_some(buffers, tensors)
        raise buffers.error(f"takes one tensor per process, not {len(tensors)}")
    return tensors[0]


def own_blocks(buffers: TensorBuffers, side: str, lists: list[Tensors] | Tensors) -> Tensors | None:
    """This rank's tensors for all ranks; None if only the root has such, and this is another.

    Torch wraps the list in another, its overloads do not.
    """
    blocks = cast("Tensors", lists)
    if lists and not isinstance(lists[0], torch.Tensor):
        if len(lists) != 1:
            raise buffers.error(f"takes one list of tensors per process, not {len(lists)}")
        blocks = lists[0]
    if buffers.root is None or buffers.root == buffers.group.rank:
        return blocks
    if blocks:
        raise buffers.error(f"takes {side} on rank {buffers.root}, the root, and none here")
    return None


def pairs(
    buffers: TensorBuffers, outputs: Tensors | torch.Tensor, inputs: Tensors | torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each output with its input."""
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
    """How many elements of a tensor go to each rank, which gets so many rows of it.

    It must be contiguous, as for torch's own backends: rows of a strided tensor are not what lies
    in memory.

    Args:
        splits: none at all share out the rows evenly.
    """
    if not tensor.is_contiguous():
        raise buffers.error(f"takes an {side} that is contiguous; pass {side}.contiguous()")
    if not tensor.dim():
        raise buffers.error(f"cannot share out the {side}: it has no dimensions")
    size, n_rows = buffers.group.size, tensor.shape[0]
    why = f"cannot share out the {side}'s {n_rows} rows"
    if not splits:
        if n_rows % size:
            raise buffers.error(f"{why} evenly among {size} ranks")
        return [tensor.numel() // size] * size
    check_count(buffers, f"{side} splits", splits)
    if min(splits) < 0:
        raise buffers.error(f"{why} as {list(splits)}: a count is negative")
    if sum(splits) != n_rows:
        raise buffers.error(f"{why} as {list(splits)}, which are {sum(splits)}")
    return [n * (tensor.numel() // n_rows) for n in splits] if n_rows else [0] * size


def check_some(buffers: TensorBuffers, tensors: Tensors) -> None:
    """There is a tensor; if not, it is the error that torch's dispatcher raises over Gloo."""
    if not tensors:
        doing = describe(buffers.group, buffers.operation)
        raise Unsupported(f"{doing} takes one tensor at least, and the list is empty")


def check_root(buffers: TensorBuffers, root: int) -> None:
    """The root is a rank of the group."""
    size = buffers.group.size
    if not 0 <= root < size:
        raise buffers.error(f"has root {root}; ranks of this group are 0 to {size - 1}")


def check_count(buffers: TensorBuffers, side: str, blocks: Sequence[object]) -> None:
    """There is one for each rank."""
    size = buffers.group.size
    if len(blocks) != size:
        raise buffers.error(f"takes {size} {side}, one for each rank, not {len(blocks)}")


def check_blocks(buffers: TensorBuffers, side: str, blocks: Tensors, like: torch.Tensor) -> None:
    """The list has a tensor for each rank, all like the one on the other side.

    Without a root only this rank's block has to be as long: all ranks know the others' lengths.
    """
    check_count(buffers, side, blocks)
    for rank, block in enumerate(blocks):
        is_as_long = buffers.root is not None or rank == buffers.group.rank
        if block.dtype != like.dtype or (is_as_long and block.numel() != like.numel()):
            raise buffers.error(
                f"cannot run: {side}[{rank}] has {_extent(block)} but must have {_extent(like)}, "
                "as the other side has"
            )


def check_whole(
    buffers: TensorBuffers, side: str, whole: torch.Tensor, block: torch.Tensor
) -> None:
    """One tensor has the elements of all ranks, the other those of one."""
    size = buffers.group.size
    if whole.dtype != block.dtype or whole.numel() != block.numel() * size:
        raise buffers.error(
            f"cannot run: the {side} has {_extent(whole)} but must have {size} times "
            f"{_extent(block)}"
        )


def check_exchange(
    buffers: TensorBuffers, tensors: Tensors, sent: Sequence[int], taken: Sequence[int]
) -> None:
    """All tensors are of one dtype, and what this rank gives itself fits.

    Args:
        sent: how many elements this rank gives to each; `taken`: has room for from each.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise buffers.error(f"takes tensors of one dtype, not of {names}")
    given, room = sent[buffers.group.rank], taken[buffers.group.rank]
    if given != room:
        raise buffers.error(f"gives itself {given} elements and has room for {room}")


def check_apart(buffers: TensorBuffers, side: str, views: Sequence[BufferView]) -> None:
    """No two of what is written share memory."""
    found = clash([view.extent for view in views], []) if len(views) > 1 else None
    if found is not None:
        first, second = sorted(found[:2])
        why = f"would write {side}[{first}] and {side}[{second}] into the same memory"
        raise buffers.error(why)


def check_calls_apart(
    buffers: TensorBuffers, calls: Sequence[tuple[Sequence[BufferView], BufferView]]
) -> None:
    """None of several calls writes where another one writes or reads.

    Args:
        calls: what each writes, and what it reads; these two have been checked against each
            other, and may share this rank's own block.
    """
    if len(calls) == 1:
        return
    n_outputs = len(calls[0][0])
    own = buffers.group.rank if n_outputs > 1 else 0
    written = [view.extent for outputs, _ in calls for view in outputs]
    read = [
        part for outputs, source in calls for part in _around(outputs[own].extent, source.extent)
    ]
    found = clash(written, read)
    if found is None:
        return
    one, other, both_written = found
    first, second = one // n_outputs, other // (n_outputs if both_written else 2)
    what = "also writes" if both_written else "reads"
    why = f"would write for tensor {first} where it {what} for tensor {second}"
    raise buffers.error(f"{why}; give them memory of their own")


def _around(own: Range, whole: Range) -> tuple[Range, Range]:
    """What is left of `whole` before and after the `own` part."""
    return (whole[0], min(whole[1], own[0])), (max(whole[0], own[1]), whole[1])


def _extent(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
