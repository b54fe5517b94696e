"""Folds and moves of tensors over Gloo and over shoal: the same calls, the same results."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
from contract.gloo_cases import (
    FLOATS,
    GATHERED,
    INTEGERS,
    MOVED,
    ROWS,
    SIZE,
    assert_passed,
    cases_in,
    given,
    other_way,
    ours,
    raised,
    run_cases,
)
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup

# ---- folds ----


def case_all_reduce(group: Group) -> Any:
    results = []
    for dtype in (*FLOATS, *INTEGERS):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            tensor = given(group.rank(), 33, dtype=dtype)
            dist.all_reduce(tensor, op=op, group=group)
            results.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = given(group.rank(), 33, dtype=torch.int64)
        dist.all_reduce(tensor, op=op, group=group)
        results.append(tensor)
    tensor = given(group.rank(), 7)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    return [*results, tensor]


def case_reduce(group: Group) -> Any:
    results = []
    for root in range(SIZE):
        for seed, dtype in enumerate((*FLOATS, *INTEGERS)):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):
                tensor = given(group.rank(), 5, 3, dtype=dtype, seed=seed)
                before = tensor.clone()
                call = functools.partial(dist.reduce, tensor, group_dst=root, op=op)
                other_way(group, seed % 2 == 0, call)
                if group.rank() == root:
                    results.append(tensor)
                elif ours(group):  # Gloo leaves partial sums here
                    assert torch.equal(tensor, before)
    return results


def case_reduce_scatter(group: Group) -> Any:
    rank = group.rank()
    output, single = torch.empty(4), torch.empty(2, 2)
    dist.reduce_scatter(output, list(given(rank, 3, 4)), group=group)
    dist.reduce_scatter_tensor(single, given(rank, 6, 2), group=group)
    again = torch.empty(4)
    dist.reduce_scatter_single(again, given(rank, 12), op=dist.ReduceOp.MAX, group=group)
    return [output, single, again]


def case_all_reduce_of_sparse_tensors(group: Group) -> Any:
    rank = group.rank()
    tensors = {
        "other indices everywhere": sparse([[0, rank + 1]], given(rank, 2), (5,)),
        "indices that repeat": sparse([[3, rank, 3]], given(rank, 3), (4,)),
        "more on some ranks": sparse([list(range(rank + 1))], given(rank, rank + 1), (6,)),
        "none on some ranks": sparse([[2]] if rank else [[]], given(rank, 1 if rank else 0), (3,)),
        "none anywhere": sparse([[]], given(rank, 0), (3,)),
        "dense dimensions": sparse([[rank, 4]], given(rank, 2, 3), (5, 3)),
        "two sparse dimensions": sparse([[rank, 1], [0, 1]], given(rank, 2), (3, 2)),
        "integers": sparse([[0, rank]], given(rank, 2, dtype=torch.int64), (3,)),
    }
    for number, tensor in enumerate(tensors.values()):
        other_way(
            group, number % 2 == 1, lambda tensor=tensor, **how: dist.all_reduce(tensor, **how)
        )
        assert tensor.is_coalesced()
    return [part for tensor in tensors.values() for part in (tensor.indices(), tensor.values())]


def sparse(indices: list[list[int]], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    where = torch.tensor(indices, dtype=torch.int64)
    return torch.sparse_coo_tensor(where, values, shape, check_invariants=False)


def case_sparse_tensors_that_do_not_match_are_refused(group: Group) -> Any:
    same = sparse([[1]], torch.ones(1), (3,))
    fold = raised(lambda: dist.all_reduce(same, op=dist.ReduceOp.MAX, group=group))
    other = sparse([[1]], torch.ones(1), (3 + group.rank(),))
    shape = raised(lambda: dist.all_reduce(other, group=group))
    if ours(group):  # Gloo does not go on
        assert "shape (3,) with 1 sparse dimensions" in str(shape)
        dist.barrier(group=group)
    return [fold is not None, shape is not None]


# ---- moves ----


def case_broadcast(group: Group) -> Any:
    tensors = [given(group.rank(), 6, dtype=dtype) for dtype in MOVED]
    for number, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=number % SIZE, group=group)
    return tensors


def case_all_gather(group: Group) -> Any:
    results = []
    for dtype in GATHERED:
        parts = [torch.empty(2, 3, dtype=dtype) for _ in range(SIZE)]
        whole = torch.empty(6, 3, dtype=dtype)
        mine = given(group.rank(), 2, 3, dtype=dtype)
        dist.all_gather(parts, mine, group=group)
        dist.all_gather_into_tensor(whole, mine, group=group)
        results += [*parts, whole]
    single = torch.empty(12)
    dist.all_gather_single(single, given(group.rank(), 4), group=group)
    return [*results, single]


def case_gather(group: Group) -> Any:
    results = []
    for root in range(SIZE):
        for number, dtype in enumerate(GATHERED):
            mine = given(group.rank(), 4, dtype=dtype)
            parts = None
            if group.rank() == root:
                parts = [torch.empty(4, dtype=dtype) for _ in range(SIZE)]
                results += parts
            call = functools.partial(dist.gather, mine, parts, group_dst=root)
            other_way(group, number % 2 == 0, call)
    return results


def case_gather_single(group: Group) -> Any:
    """torch 2.15 has it; before, the group itself is asked, and Gloo for a list instead."""
    rank, root = group.rank(), 1
    whole = torch.empty(3, 4) if rank == root else None
    if not ours(group):
        dist.gather(given(rank, 4), list(whole) if whole is not None else None, 1, group)
        return [whole] if whole is not None else []
    opts = dist.GatherOptions()
    opts.rootRank = root
    group.gather_single(whole, given(rank, 4), opts).wait()
    return [whole] if whole is not None else []


def case_scatter(group: Group) -> Any:
    results = []
    for root in range(SIZE):
        for number, dtype in enumerate(MOVED):
            output = torch.empty(4, dtype=dtype)
            parts = list(given(root, SIZE, 4, dtype=dtype)) if group.rank() == root else None
            call = functools.partial(dist.scatter, output, parts, group_src=root)
            other_way(group, number % 2 == 0, call)
            results.append(output)
    return results


def case_gather_and_scatter_of_strided_tensors(group: Group) -> Any:
    rank, root = group.rank(), 2
    table = torch.zeros(5, SIZE)
    columns = [table[:, i] for i in range(SIZE)]
    dist.gather(given(rank, 5, 2)[:, 1], columns if rank == root else None, root, group)
    output = torch.zeros(4, 5)
    source = given(root, 5, SIZE)
    parts = [source[:, i] for i in range(SIZE)] if rank == root else None
    if ours(group):
        dist.scatter(output[1], parts, root, group)
    else:  # Gloo wants them contiguous
        parts = [part.contiguous() for part in parts] if parts else None
        dist.scatter(output[1], parts, root, group)
    return [table, output]


def case_all_to_all(group: Group) -> Any:
    results = []
    for number, dtype in enumerate(MOVED):
        outputs = [torch.empty(3, dtype=dtype) for _ in range(SIZE)]
        inputs = list(given(group.rank(), SIZE, 3, dtype=dtype))
        other_way(group, number % 2 == 0, functools.partial(dist.all_to_all, outputs, inputs))
        results += outputs
    return results


def case_all_to_all_of_uneven_parts(group: Group) -> Any:
    rank = group.rank()
    n_given, n_taken = ROWS[rank], [row[rank] for row in ROWS]
    results = []
    for dtype in MOVED:
        mine = given(rank, sum(n_given), 2, dtype=dtype)
        output = torch.empty(sum(n_taken), 2, dtype=dtype)
        dist.all_to_all_single(output, mine, n_taken, n_given, group=group)
        results.append(output)
        if ours(group):  # Gloo's lists must be even
            parts = [torch.empty(n, 2, dtype=dtype) for n in n_taken]
            dist.all_to_all(parts, list(mine.split(n_given)), group=group)
            assert torch.equal(torch.cat(parts), output)
    even = torch.empty(SIZE * 2, 3)
    dist.all_to_all_single(even, given(rank, SIZE * 2, 3), group=group)
    return [*results, even]


def case_all_to_all_in_place(group: Group) -> Any:
    mine = given(group.rank(), SIZE, 4)
    output = mine if ours(group) else torch.empty(SIZE, 4)
    dist.all_to_all_single(output, mine, group=group)
    strided = given(group.rank(), 4, SIZE).t()
    error = raised(lambda: dist.all_to_all_single(torch.empty(SIZE, 4), strided, group=group))
    assert isinstance(error, ValueError)
    assert "contiguous" in str(error)
    return [output]


CASES = cases_in(globals())


def run_in_a_rank() -> dict[str, str]:
    return run_cases(CASES)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_in_a_rank, SIZE, deadline_s=110)


@pytest.mark.parametrize("case", CASES)
def test_shoal_does_what_gloo_does(failures: list[dict[str, str]], case: str) -> None:
    assert_passed(failures, case)
