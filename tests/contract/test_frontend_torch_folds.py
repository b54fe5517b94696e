"""What torch.distributed promises of folds, checked over real processes of several sizes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
from contract.torch_checks import (
    FOLDS,
    all_given,
    check_close,
    check_equal,
    folded,
    given,
    op_of,
    reduced,
)
from process.shared_ranks import Case, SharedRanks, cases_in

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup


def case_all_reduce_folds_every_dtype(group: Group) -> None:
    for seed, (dtype, fold) in enumerate(FOLDS):
        tensors = all_given(dtype, group, 37, seed)
        actual = reduced(group, tensors[group.rank()].clone(), fold)
        check_close(actual, folded(fold, tensors))


def case_all_reduce_of_any_length(group: Group) -> None:
    for n in (0, 1, 2, 3, 4, 5, 7, 127, 4099, 100_003, 1_000_003):
        tensors = all_given(torch.float32, group, n)
        actual = tensors[group.rank()].clone()
        dist.all_reduce(actual, group=group)
        check_close(actual, folded("SUM", tensors))


def case_premul_sum_multiplies_the_own_contribution(group: Group) -> None:
    for factor in (0.5, torch.tensor([0.25]), torch.tensor(3.0)):
        ops = [dist._make_nccl_premul_sum(factor)]
        if hasattr(dist.ReduceOp, "factor"):  # torch >= 2.13
            ops.append(dist.ReduceOp.PREMUL_SUM(factor))
        for op in ops:
            tensors = all_given(torch.float64, group, 11)
            actual = tensors[group.rank()].clone()
            dist.all_reduce(actual, op=op, group=group)
            check_close(actual, folded("SUM", tensors) * float(factor))
            whole = torch.cat(tensors)
            output = torch.empty(11, dtype=torch.float64)
            before = whole.clone()
            dist.reduce_scatter_tensor(
                output, torch.cat([tensors[group.rank()]] * group.size()), op=op, group=group
            )
            check_close(output, folded("SUM", tensors) * float(factor))
            check_equal(whole, before)


def case_coalesced_all_reduce(group: Group) -> None:
    dtypes = [torch.float32, torch.int64, torch.bfloat16]
    for async_op in (False, True):
        opts = dist.AllreduceCoalescedOptions()
        opts.asyncOp = async_op
        mine = [given(dtype, group.rank(), 5 + i, i) for i, dtype in enumerate(dtypes)]
        group.allreduce_coalesced(mine, opts).wait()
        for i, dtype in enumerate(dtypes):
            check_close(mine[i], folded("SUM", all_given(dtype, group, 5 + i, i)))
    with dist._coalescing_manager(group):
        tensors = [torch.full((3,), float(group.rank())) for _ in range(4)]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    for tensor in tensors:
        check_equal(tensor, torch.full((3,), float(sum(range(group.size())))))


def case_reduce_scatter(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for seed, (dtype, fold) in enumerate(FOLDS):
        n = 13
        wholes = all_given(dtype, group, n * size, seed)
        expected = folded(fold, wholes)[rank * n : (rank + 1) * n]
        blocks = list(wholes[rank].clone().split(n))
        opts = dist.ReduceScatterOptions()
        opts.reduceOp, opts.asyncOp = op_of(fold), bool(seed % 2)
        output = torch.empty(n, dtype=dtype)
        group.reduce_scatter([output], [blocks], opts).wait()
        check_close(output, expected)
        check_equal(torch.cat(blocks) if "uint" not in str(dtype) else wholes[rank], wholes[rank])
        single = torch.empty(n, dtype=dtype)
        group._reduce_scatter_base(single, wholes[rank].clone(), opts).wait()
        check_equal(single, output)


def case_reduce_scatter_into_its_own_input(group: Group) -> None:
    rank, size = group.rank(), group.size()
    wholes = all_given(torch.float64, group, 7 * size)
    whole = wholes[rank].clone()
    output = whole[rank * 7 : (rank + 1) * 7]
    dist.reduce_scatter_tensor(output, whole, group=group)
    check_close(output, folded("SUM", wholes)[rank * 7 : (rank + 1) * 7])


def case_coalesced_reduce_scatter(group: Group) -> None:
    size = group.size()
    inputs = [torch.arange(k * size, dtype=torch.float32) for k in (1, 5, 9)]
    outputs = [torch.empty(k) for k in (1, 5, 9)]
    group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    for one, output in zip(inputs, outputs, strict=True):
        check_equal(output, (one * size).view(size, -1)[group.rank()])


def in_rank(case: str) -> None:
    globals()[case](dist.group.WORLD)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_torch(case: Case, one_or_three_ranks: SharedRanks) -> None:
    one_or_three_ranks.run(in_rank, case.__name__)
