"""Calls that take lists of tensors: what happens where these share memory, or are none at all.

Every `case_` runs in every rank, once in a shoal group and once in a Gloo group beside it, on the
same inputs, and returns what it got; the two must be alike, to the bit. Where Gloo's result depends
on which of its threads is quicker, shoal refuses the call: every `refused_` is called over shoal
alone, must raise before it writes anything, and leave a group that works.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from process.stage import error_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.shared_ranks import SharedRanks, gloo_group

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup


def given(group: Group, n: int, seed: int = 1) -> Tensor:
    """Whole numbers, so that no order of adding them matters."""
    return torch.arange(float(n)) * (group.rank() + seed) + 10 * group.rank()


def coalesced(group: Group, tensors: list[Tensor], **options: Any) -> None:
    opts = dist.AllreduceCoalescedOptions()
    for name, value in options.items():
        setattr(opts, name, value)
    group.allreduce_coalesced(tensors, opts).wait()


# ---- in place ----


def case_gathered_from_the_own_blocks_of_the_outputs(group: Group) -> Any:
    rank, size = group.rank(), group.size()
    outputs = [torch.zeros(n * size) for n in (2, 5)]
    with dist._coalescing_manager(group):
        for n, output in zip((2, 5), outputs, strict=True):
            own = output[rank * n : (rank + 1) * n]
            own.copy_(given(group, n))
            dist.all_gather_into_tensor(output, own, group=group)
    return outputs


def case_gathered_twice_from_one_input(group: Group) -> Any:
    mine = given(group, 3)
    outputs = [torch.zeros(3 * group.size()) for _ in range(2)]
    with dist._coalescing_manager(group):
        for output in outputs:
            dist.all_gather_into_tensor(output, mine, group=group)
    return outputs


def case_lists_gathered_from_the_own_outputs(group: Group) -> Any:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(group.size())]
    for one in outputs[group.rank()]:
        one.copy_(given(group, one.numel()))
    inputs = outputs[group.rank()]
    dist.all_gather_coalesced(outputs, inputs, group=group)
    return [tensor for row in outputs for tensor in row]


# ---- blocks of unequal lengths ----


def unequal(group: Group) -> list[list[int]]:
    """Lengths by rank: short ones, none for some rank, and some of more than a segment."""
    n = group.size()
    return [list(range(1, n + 1)), [0, *[5] * (n - 1)], [70_000 + 333 * rank for rank in range(n)]]


def case_reduce_scatter_of_unequal_lists(group: Group) -> Any:
    outputs = []
    for lengths in unequal(group):
        for dtype in (torch.float32, torch.float16, torch.int64):
            for async_op in (False, True):
                inputs = [
                    given(group, n, seed).remainder(64).to(dtype) for seed, n in enumerate(lengths)
                ]
                output = torch.zeros(lengths[group.rank()], dtype=dtype)
                op = dist.ReduceOp.MAX if dtype is torch.int64 else dist.ReduceOp.SUM
                work = dist.reduce_scatter(output, inputs, op, group, async_op)
                if work is not None:
                    work.wait()
                outputs.append(output)
    return outputs


def case_all_gather_of_unequal_lists(group: Group) -> Any:
    """Gloo refuses it, against torch's documentation; each block is broadcast there."""
    outputs = []
    for lengths in unequal(group):
        lists = [torch.zeros(n) for n in lengths]
        own = given(group, lengths[group.rank()])
        if dist.get_backend(group) == "shoal":
            dist.all_gather(lists, own, group=group)
        else:
            lists[group.rank()].copy_(own)
            for root, block in enumerate(lists):
                dist.broadcast(block, group=group, group_src=root)
        outputs += lists
    return outputs


def case_all_gather_of_unequal_strided_and_coalesced_lists(group: Group) -> Any:
    size = group.size()
    rows = [[torch.zeros(3, rank + 2).t(), torch.zeros(4)] for rank in range(size)]
    inputs = [given(group, one.numel(), 2).view_as(one) for one in rows[group.rank()]]
    if dist.get_backend(group) == "shoal":
        dist.all_gather_coalesced(rows, inputs, group=group)
        return [one.contiguous() for row in rows for one in row]
    found = [[one.contiguous() for one in row] for row in rows]
    for one, block in zip(inputs, found[group.rank()], strict=True):
        block.copy_(one)
    for root, row in enumerate(found):
        for block in row:
            dist.broadcast(block, group=group, group_src=root)
    return [block for row in found for block in row]


def case_strided_outputs_that_later_ones_overlap(group: Group) -> Any:
    rank, size = group.rank(), group.size()
    one = torch.arange(4.0) + 10 * (rank + 1)
    gathered, coalesced_, folded = torch.zeros(4 * size + 8), torch.zeros(20), torch.zeros(20)
    blocks = [gathered[4 * r : 4 * r + 4] for r in range(size)]
    blocks[0] = gathered[0:8:2]
    dist.all_gather(blocks, one, group=group)
    rows = [[coalesced_[0:8:2], coalesced_[9:13:2]], [coalesced_[5:9], coalesced_[10:12]]]
    rows += [[torch.zeros(4), torch.zeros(2)] for _ in range(size - 2)]
    rows[1][0] = coalesced_[6:10]
    dist.all_gather_coalesced(rows[:size], [one, one[:2] + 5], group=group)
    folded += rank
    dist.all_reduce_coalesced([folded[0:8:2], folded[5:9]], group=group)
    return [gathered, coalesced_, folded]


# ---- no tensors at all ----


def case_empty_lists(group: Group) -> Any:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce_coalesced([], group=group),
        lambda: coalesced(group, []),
        lambda: dist.all_gather_coalesced([], [], group=group),
        lambda: dist.all_gather_coalesced([[] for _ in range(group.size())], [], group=group),
        lambda: dist.all_to_all([], [], group=group),
        lambda: dist.all_gather([], torch.ones(2), group=group),
        lambda: dist.reduce_scatter(torch.ones(2), [], group=group),
        lambda: group.allreduce([]).wait(),
        lambda: group.broadcast([]).wait(),
        lambda: group.reduce([]).wait(),
        lambda: group.send([], 0, 0).wait(),
        lambda: group.recv([], 0, 0).wait(),
        lambda: group.recv_anysource([], 0).wait(),
    ]
    names = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
    calls += [
        lambda name=name: getattr(group, name)([], []).wait()
        for name in names
        if hasattr(group, name)  # until torch 2.13
    ]
    errors = [error_of(call) for call in calls]
    return [
        f"{number}: {isinstance(error, RuntimeError)}, {isinstance(error, NotImplementedError)}"
        for number, error in enumerate(errors)
    ]


# ---- refused ----


def refused_outputs_of_two_gathers(group: Group) -> list[Tensor]:
    whole = torch.zeros(4 * group.size() - 1)
    n = 2 * group.size()
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(whole[:n], torch.ones(2), group=group)
        dist.all_gather_into_tensor(whole[n - 1 :], torch.ones(2), group=group)
    return [whole]


def refused_input_of_one_gather_in_the_output_of_another(group: Group) -> list[Tensor]:
    first, second = torch.zeros(2 * group.size()), torch.zeros(2 * group.size())
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(first, torch.ones(2), group=group)
        dist.all_gather_into_tensor(second, first[1:3], group=group)
    return [first, second]


def refused_outputs_of_gathered_lists(group: Group) -> list[Tensor]:
    outputs = [[torch.zeros(3), torch.zeros(3)] for _ in range(group.size())]
    outputs[0][1] = outputs[-1][0]
    dist.all_gather_coalesced(outputs, [torch.ones(3), torch.ones(3)], group=group)
    return [tensor for row in outputs for tensor in row]


def refused_outputs_of_two_reduce_scatters(group: Group) -> list[Tensor]:
    output = torch.zeros(2)
    with dist._coalescing_manager(group):
        for _ in range(2):
            dist.reduce_scatter_tensor(output, torch.ones(2 * group.size()), group=group)
    return [output]


def refused_output_of_one_reduce_scatter_in_the_input_of_another(group: Group) -> list[Tensor]:
    whole, output = torch.zeros(2 * group.size()), torch.zeros(2)
    own = whole[2 * group.rank() : 2 * group.rank() + 2]
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(own, whole, group=group)  # in place: this alone is fine
        dist.reduce_scatter_tensor(output, whole, group=group)
    return [whole, output]


def refused_tensors_of_one_all_reduce(group: Group) -> list[Tensor]:
    tensors = [torch.zeros(5)] * 2
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def refused_an_input_in_another_ranks_block_of_its_output(group: Group) -> list[Tensor]:
    whole = torch.zeros(2 * group.size())
    other = 2 * (1 - group.rank() % 2)
    dist.all_gather_into_tensor(whole, whole[other : other + 2], group=group)
    return [whole]


def refused_the_second_gather_in_another_ranks_block_of_its_output(group: Group) -> list[Tensor]:
    first, second = torch.zeros(2 * group.size()), torch.zeros(2 * group.size())
    other = 2 * (1 - group.rank() % 2)
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(first, torch.ones(2), group=group)
        dist.all_gather_into_tensor(second, second[other : other + 2], group=group)
    return [first, second]


def refused_the_second_scatter_into_another_ranks_block_of_its_input(group: Group) -> list[Tensor]:
    first, second = torch.zeros(2), torch.zeros(2 * group.size())
    other = 2 * (1 - group.rank() % 2)
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(first, torch.ones(2 * group.size()), group=group)
        dist.reduce_scatter_tensor(second[other : other + 2], second, group=group)
    return [first, second]


def refused_one_tensor_as_input_and_output_of_an_exchange(group: Group) -> list[Tensor]:
    whole = torch.zeros(group.size())
    dist.all_to_all_single(whole, whole, group=group)
    return [whole]


# ---- how they are run ----


def named(prefix: str) -> dict[str, Callable[[Group], Any]]:
    every = globals().items()
    return {name.removeprefix(prefix): each for name, each in every if name.startswith(prefix)}


CASES, REFUSED = named("case_"), named("refused_")


def check_alike(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), f"{got} is not {expected}"
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_alike(one, other)
    else:
        assert got == expected, f"{got} is not {expected}"


def check_refused(case: Callable[[Group], list[Tensor]], group: Group) -> None:
    written: list[Tensor] = []
    zeros = torch.zeros

    def noted(*shape: Any) -> Tensor:
        written.append(zeros(*shape))
        return written[-1]

    torch.zeros = noted  # type: ignore[assignment]
    try:
        error = error_of(case, group)
    finally:
        torch.zeros = zeros
        dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)  # torch leaves it behind
    assert type(error).__name__ == "UsageError", repr(error)
    assert re.search("memory of their own|overlap in memory", str(error)), error
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == group.size()
    assert written
    assert not any(tensor.any() for tensor in written)  # also by a call that had begun


def alike(name: str) -> None:
    with gloo_group(timeout=timedelta(seconds=20)) as gloo:
        check_alike(CASES[name](dist.group.WORLD), CASES[name](gloo))


def refused(name: str) -> None:
    check_refused(REFUSED[name], dist.group.WORLD)


@pytest.mark.parametrize("name", CASES)
def test_lists_are_taken_as_gloo_takes_them(name: str, three_ranks: SharedRanks) -> None:
    three_ranks.run(alike, name)


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_share_memory_are_refused_where_gloos_result_varies(
    name: str, three_ranks: SharedRanks
) -> None:
    three_ranks.run(refused, name)
