"""How the tensors of torch's operations become the buffers of collectives, checked on the way.

Each public function takes what an operation writes and what it reads, as torch gives them, and
returns the buffer arguments of each collective to call. Of these, `blocks` are for all ranks: a
tensor for each, or one tensor of them all; None where only the root has them and this is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.frontend.torch import checks
from shoal.frontend.torch.checks import Tensors

if TYPE_CHECKING:
    from shoal.frontend.torch.tensor_buffers import TensorBuffers
    from shoal.group.buffers import BufferView

Arguments = tuple[Any, ...]
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
    return [(buffers.updated(checks.only(buffers, tensors)),)]


def each_in_place(buffers: TensorBuffers, tensors: Tensors, _inputs: None) -> list[Arguments]:
    """Each tensor is read and written, by a collective of its own."""
    checks.check_some(buffers, tensors)
    return [(view,) for view in buffers.updated_apart(tensors)]


def root_in_place(buffers: TensorBuffers, tensors: OneOrList, _inputs: None) -> list[Arguments]:
    """The root's tensor is read and written, those of other ranks are only read."""
    if buffers.group.rank == buffers.root:
        return one_in_place(buffers, tensors, None)
    tensor = checks.only(buffers, tensors)
    buffers.results.append(tensor)  # torch wants it everywhere
    return [(buffers.read(tensor),)]


# ---- the blocks of all ranks are written, one is read ----


def gathered_lists(buffers: TensorBuffers, outputs: Lists, inputs: OneOrList) -> list[Arguments]:
    """A list of outputs, at the root if there is one; and one input."""
    blocks = checks.own_blocks(buffers, "outputs", outputs)
    return _gathered(buffers, [(blocks, checks.only(buffers, inputs))])


def gathered_by_rank(
    buffers: TensorBuffers, outputs: list[Tensors], inputs: Tensors
) -> list[Arguments]:
    """A collective for each input: the outputs of the i-th are `outputs[rank][i]`."""
    checks.check_some(buffers, inputs)
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
    return _gathered(buffers, checks.pairs(buffers, outputs, inputs))


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
        checks.check_apart(buffers, "outputs", outputs)
        source = buffers.read_beside(one, outputs, own)
        calls.append((outputs, source))
        arguments.append((_argument(blocks, outputs), source))
    checks.check_calls_apart(buffers, calls)
    return arguments


# ---- the blocks of all ranks are read, one is written ----


def scattered_lists(buffers: TensorBuffers, outputs: OneOrList, inputs: Lists) -> list[Arguments]:
    """One output; and a list of inputs, at the root if there is one."""
    blocks = checks.own_blocks(buffers, "inputs", inputs)
    return _scattered(buffers, [(checks.only(buffers, outputs), blocks)])


def scattered_wholes(
    buffers: TensorBuffers, outputs: OneOrList, inputs: OneOrList
) -> list[Arguments]:
    """A collective for each output and its input, which is of all ranks."""
    return _scattered(buffers, checks.pairs(buffers, outputs, inputs))


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
    checks.check_calls_apart(buffers, calls)
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
        checks.check_whole(buffers, side, blocks, like)
        whole = view(blocks)
        return [whole], whole.address + rank * like.nbytes
    checks.check_blocks(buffers, f"{side}s", blocks, like)
    views = [view(block) for block in blocks]
    return views, views[rank].address


def _argument(blocks: Blocks, views: list[BufferView]) -> BufferView | list[BufferView]:
    return views[0] if isinstance(blocks, torch.Tensor) else views


# ---- the r-th output comes from rank r, the r-th input goes there ----


def exchanged_lists(buffers: TensorBuffers, outputs: Tensors, inputs: Tensors) -> list[Arguments]:
    """An output and an input for each rank. Lengths may differ."""
    checks.check_some(buffers, [*outputs, *inputs])
    checks.check_count(buffers, "outputs", outputs)
    checks.check_count(buffers, "inputs", inputs)
    sent, taken = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
    checks.check_exchange(buffers, [*outputs, *inputs], sent, taken)
    written = [buffers.written(output) for output in outputs]
    checks.check_apart(buffers, "outputs", written)
    return [(written, buffers.read_all_beside(inputs, written))]


def exchanged_rows(buffers: TensorBuffers, outputs: Rows, inputs: Rows) -> list[Arguments]:
    """The rows of two tensors, which may be the same."""
    (output, output_splits), (given, input_splits) = outputs, inputs
    taken = checks.split(buffers, "output", output, output_splits)
    sent = checks.split(buffers, "input", given, input_splits)
    checks.check_exchange(buffers, [output, given], sent, taken)
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
