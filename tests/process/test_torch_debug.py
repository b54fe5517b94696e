"""Under TORCH_DISTRIBUTED_DEBUG=DETAIL a mismatch of calls raises at the call.

Torch checks this over Gloo; shoal checks the rest itself. No rank waits for a Work
here: an error that only the Work raises would stay hidden.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from process.ranks import on_ranks
from process.stage import error_of, leave_at_once

from shoal.errors import UsageError


def ones(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(n) for n in lengths]


def fold(tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(tensor, op=op, group=group, async_op=True)


def fold_several(tensors: list[torch.Tensor], group: Any) -> None:
    group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())


def fold_two(group: Any) -> None:
    fold(torch.ones(2), group)


def broadcast_from(root: int) -> Callable[[Any], Any]:
    how: Any = {"group_src": root, "async_op": True}
    return lambda group: dist.broadcast(torch.ones(2), group=group, **how)


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)


# The call of rank 1, the call of every other rank, and text for both.
SEEN_BY_TORCH: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], list[str]]] = {
    "another collective": (broadcast_from(0), fold_two, ["broadcast", "all_?reduce"]),
    "another length": (lambda group: fold(torch.ones(3), group), fold_two, ["3", "2"]),
    "another type": (
        lambda group: fold(torch.ones(2, dtype=torch.int64), group),
        fold_two,
        ["int64|Long", "float"],
    ),
}
SEEN_BY_SHOAL = {
    "another fold": (
        lambda group: fold(torch.ones(2), group, dist.ReduceOp.MAX),
        fold_two,
        ["all_reduce float32.2. max on rank 1", "all_reduce float32.2. sum on ranks 0, 2"],
    ),
    "another root": (
        broadcast_from(1),
        broadcast_from(0),
        ["broadcast float32.2. root 1 on rank 1", "broadcast float32.2. root 0 on ranks 0, 2"],
    ),
    "fewer tensors": (
        lambda group: fold_several(ones(2), group),
        lambda group: fold_several(ones(2, 2), group),
        ["float32.2. sum on rank 1", "float32.2. sum, the first of 2 on ranks 0, 2"],
    ),
    "long lists that differ at their ends": (
        lambda group: fold_several(ones(*[2] * 100, 3), group),
        lambda group: fold_several(ones(*[2] * 100, 4), group),
        ["part 100 of this call", "float32.3. sum on rank 1", "float32.4. sum on ranks 0, 2"],
    ),
    "a sparse tensor": (
        lambda group: fold(sparse(), group),
        fold_two,
        ["all_reduce of a sparse tensor on rank 1", "all_reduce float32"],
    ),
    "a barrier": (
        lambda group: dist.barrier(group=group, async_op=True),
        lambda group: dist.all_to_all(ones(*[2] * group.size()), ones(*[2] * group.size()), group),
        ["barrier on rank 1", "all_to_all float32"],
    ),
}


def all_calls(group: Any) -> float:
    """Make one call of each kind, some in a different form per rank; return the results."""
    rank, size = group.rank(), group.size()
    whole, parts = torch.zeros(2 * size), ones(*[2] * size)
    tensor = torch.ones(2)
    fold_several([tensor], group)
    dist.all_reduce(tensor, group=group)
    if rank == 1:  # the same collective, into one tensor or into a list
        dist.all_gather(parts, tensor, group=group)
        whole = torch.cat(parts)
    else:
        dist.all_gather_into_tensor(whole, tensor, group=group)
    dist.reduce_scatter(tensor, list(whole.split(2)), group=group)
    dist.reduce(tensor, group_dst=1, group=group)
    dist.broadcast(tensor, group_src=1, group=group)
    dist.gather(tensor, parts if rank == 0 else None, group_dst=0, group=group)
    dist.scatter(tensor, parts if rank == 0 else None, group_src=0, group=group)
    rows = [1 + (rank + other) % 2 for other in range(size)]  # different lengths for each pair
    dist.all_to_all_single(torch.zeros(sum(rows)), torch.ones(sum(rows)), rows, rows, group=group)
    entries = sparse()
    dist.all_reduce(entries, group=group)
    dist.barrier(group=group)
    return tensor.sum().item() + entries.values().sum().item()


def train_with_ddp(group: Any) -> None:
    layer = torch.nn.Linear(4, 3, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
    wrapped(torch.full((2, 4), group.rank() + 1.0)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), group.size() + 1.0))


@on_ranks(3)
def test_a_mismatch_raises_at_the_call_without_a_wait() -> None:
    leave_at_once()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as torch does at its start, from the variable
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    for name, (one, others, words) in (SEEN_BY_TORCH | SEEN_BY_SHOAL).items():
        group = dist.new_group(timeout=timedelta(seconds=20))
        error = error_of(one if group.rank() == 1 else others, group)
        text = f"{name}: {type(error).__name__}: {error}"
        assert isinstance(error, RuntimeError), text
        if name in SEEN_BY_SHOAL:
            assert isinstance(error, UsageError), text
            assert "no data was moved" in text
        for each in words:
            assert re.search(each, str(error), re.IGNORECASE), f"{each!r} not in {text!r}"
        for total in (torch.ones(1), sparse()):
            dist.all_reduce(total, group=group)
            assert total.sum().item() == group.size()
    train_with_ddp(dist.new_group())
    assert all_calls(dist.new_group()) == 3 * 3 * 3 * 3 * 2 + 3
    dist.destroy_process_group()
