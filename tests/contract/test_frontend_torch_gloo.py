"""Each case gives the same result on three ranks in a shoal group and in a Gloo group beside it."""

import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from contract import torch_checks as checks
from contract.torch_checks import Group, Tensor
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group
from process.stage import error_of

SIZE = 3

# ROWS[r][t]: the number of rows that rank r sends to rank t.
ROWS = [[2, 0, 1], [3, 1, 0], [0, 4, 2]]


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the values of a rank."""
    return checks.given(dtype, rank, math.prod(shape), seed).view(shape)


def ours(group: Group) -> bool:
    return dist.get_backend(group) == "shoal"


def check_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        checks.check_close(got, checks.wide(expected))
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_equal(one, other)
    else:
        assert got == expected


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
        work = dist.all_reduce(tensor, group=group, async_op=number % 2 == 1)
        if work is not None:
            work.wait()
        assert tensor.is_coalesced()
    return [part for tensor in tensors.values() for part in (tensor.indices(), tensor.values())]


def case_a_sparse_tensor_of_inference_mode(group: Group) -> Any:
    with torch.inference_mode():
        tensor = sparse([[group.rank()]], torch.ones(1), (3,))
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return tensor.to_dense()


def sparse(indices: list[list[int]], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    where = torch.tensor(indices, dtype=torch.int64)
    return torch.sparse_coo_tensor(where, values, shape, check_invariants=False)


def case_sparse_tensors_that_do_not_match_are_refused(group: Group) -> Any:
    same = sparse([[1]], torch.ones(1), (3,))
    fold = error_of(lambda: dist.all_reduce(same, op=dist.ReduceOp.MAX, group=group))
    other = sparse([[1]], torch.ones(1), (3 + group.rank(),))
    shape = error_of(lambda: dist.all_reduce(other, group=group))
    if ours(group):  # Gloo does not go on
        assert "shape (3,) with 1 sparse dimensions" in str(shape)
        dist.barrier(group=group)
    return [fold is not None, shape is not None]


def case_all_to_all_of_uneven_parts(group: Group) -> Any:
    rank = group.rank()
    n_given, n_taken = ROWS[rank], [row[rank] for row in ROWS]
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
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


def case_objects(group: Group) -> Any:
    rank = group.rank()
    mine = {"rank": rank, "pad": "x" * (50 * rank), "tensor": [1.5] * rank}
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, mine, group=group)
    at_root = [None] * SIZE if rank == 1 else None
    dist.gather_object(mine, at_root, group_dst=1, group=group)
    dealt: list[Any] = [None]
    cards = [("for", i, "y" * i) for i in range(SIZE)] if rank == 2 else None
    dist.scatter_object_list(dealt, cards, group_src=2, group=group)
    broadcast = [rank, {"from": rank}] if rank == 0 else [None, None]
    dist.broadcast_object_list(broadcast, group_src=0, group=group)
    passed: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], group_dst=2, group=group)
    elif rank == 2:
        assert dist.recv_object_list(passed, group_src=0, group=group) == 0
    return [everyone, at_root, dealt, broadcast, passed]


def case_barriers(group: Group) -> Any:
    dist.barrier(group=group)
    dist.barrier(group=group, device_ids=[0])
    has_timeout = "timeout" in inspect.signature(dist.barrier).parameters  # from torch 2.12 on
    limit = {"timeout": timedelta(seconds=20)} if has_timeout else {}
    work = dist.barrier(group=group, async_op=True, **limit)
    work.wait()
    group.monitored_barrier(timedelta(seconds=20))
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    if not ours(group):  # tests/process/test_torch_versions.py checks if torch allows shoal's
        dist.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=True)
    return []


def case_functional_collectives(group: Group) -> Any:
    rank = group.rank()
    mine, long = given(rank, 4), given(rank, 6, 2)
    n_given, n_taken = ROWS[rank], [row[rank] for row in ROWS]
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_reduce(mine, "max", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.all_gather_tensor(long, 1, group),
        functional.reduce_scatter_tensor(long, "sum", 0, group),
        functional.broadcast(mine, 1, group),
        functional.all_to_all_single(long, None, None, group),
        functional.all_to_all_single(long, n_taken, n_given, group)
        if sum(n_given) == 6
        else functional.all_to_all_single(given(rank, sum(n_given), 2), n_taken, n_given, group),
        functional.permute_tensor(mine, [1, 2, 0], group),
        *functional.all_reduce_coalesced([mine, long], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, long], group),
        *functional.reduce_scatter_tensor_coalesced([long, 2 * long], "sum", [0, 0], group),
    ]
    unawaited = functional.all_reduce(mine, "sum", group)
    dist.all_reduce(unawaited, group=group)  # waits for it
    return [functional.wait_tensor(result).clone() for result in [*results, unawaited]]


def whole_numbers(group: Group, n: int, seed: int = 1) -> Tensor:
    """Return the values of a rank, whose sums are exact in any order."""
    return torch.arange(float(n)) * (group.rank() + seed) + 10 * group.rank()


def case_gathers_from_blocks_of_the_outputs_and_from_one_input(group: Group) -> Any:
    rank, size = group.rank(), group.size()
    blocks = [torch.zeros(n * size).view(size, n) for n in (2, 5)]
    outputs = torch.zeros(2, 3 * size)
    with dist._coalescing_manager(group):
        for block in blocks:
            own = block[rank].copy_(whole_numbers(group, block.shape[1]))
            dist.all_gather_into_tensor(block.view(-1), own, group=group)
    mine = whole_numbers(group, 3)
    with dist._coalescing_manager(group):
        for output in outputs:
            dist.all_gather_into_tensor(output, mine, group=group)
    return [*blocks, outputs]


def case_gathers_of_lists_from_their_outputs(group: Group) -> Any:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(group.size())]
    for one in outputs[group.rank()]:
        one.copy_(whole_numbers(group, one.numel()))
    inputs = outputs[group.rank()]
    dist.all_gather_coalesced(outputs, inputs, group=group)
    return [tensor for row in outputs for tensor in row]


def case_reduce_scatter_of_unequal_lists(group: Group) -> Any:
    outputs = []
    for lengths in checks.unequal(group):
        for dtype in (torch.float32, torch.float16, torch.int64):
            for async_op in (False, True):
                inputs = [
                    whole_numbers(group, n, seed).remainder(64).to(dtype)
                    for seed, n in enumerate(lengths)
                ]
                output = torch.zeros(lengths[group.rank()], dtype=dtype)
                op = dist.ReduceOp.MAX if dtype is torch.int64 else dist.ReduceOp.SUM
                work = dist.reduce_scatter(output, inputs, op, group, async_op)
                if work is not None:
                    work.wait()
                outputs.append(output)
    return outputs


def case_empty_lists(group: Group) -> Any:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce_coalesced([], group=group),
        lambda: group.allreduce_coalesced([], dist.AllreduceCoalescedOptions()).wait(),
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
    both = [getattr(group, name, None) for name in names]  # until torch 2.13
    calls += [lambda call=call: call([], []).wait() for call in both if call]
    kinds = (RuntimeError, NotImplementedError)
    errors = [error_of(call) for call in calls]
    return [f"{n}: {[isinstance(error, one) for one in kinds]}" for n, error in enumerate(errors)]


def case_groups(group: Group) -> Any:
    name = dist.get_backend(group)
    pair = dist.new_group([0, 2], backend=name)
    own, _ = dist.new_subgroups(group_size=1, group=dist.group.WORLD)
    some, _ = dist.new_subgroups_by_enumeration([[2, 0], [1]], backend=name)
    results: list[Any] = [dist.get_world_size(own), dist.get_process_group_ranks(some)]
    tensor = given(group.rank(), 3)
    dist.all_reduce(tensor, group=some)
    results.append(tensor)
    if group.rank() != 1:
        results += [dist.get_process_group_ranks(pair), dist.get_rank(pair)]
        results += [dist.get_group_rank(pair, 2), dist.get_global_rank(pair, 1)]
        moved = torch.tensor([float(group.rank())])
        dist.broadcast(moved, src=2, group=pair)
        dist.reduce(moved, dst=2, group=pair)
        results.append(moved if group.rank() == 2 else None)
    return results


def compare(case: str) -> None:
    limit = timedelta(seconds=10)
    mine = dist.new_group(backend="shoal", timeout=limit)
    with gloo_group(timeout=limit) as theirs:
        check_equal(globals()[case](mine), globals()[case](theirs))


@pytest.mark.parametrize("case", cases_in(globals()))
def test_shoal_gives_the_results_of_gloo(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(compare, case.__name__)
