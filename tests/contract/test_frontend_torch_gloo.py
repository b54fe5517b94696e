"""What torch.distributed does over Gloo it does over shoal: the same calls, the same results.

Every `case_` below runs in every one of three ranks, once in a shoal group and once in a Gloo group
beside it, on the same inputs, and returns what it got; the two must be alike. Each is reported as a
test of its own; the processes are started once.
"""

from __future__ import annotations

import functools
import importlib.util
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup

SIZE = 3

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
GATHERED = [*FLOATS, *INTEGERS]  # Gloo gathers no others
MOVED = [*GATHERED, torch.bool, torch.complex64, torch.complex128]

# Gloo folds in another order.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a rank puts in: small, so that no integer overflows."""
    source = torch.Generator().manual_seed(100 * seed + rank)
    whole = torch.randint(0, 4, shape, generator=source)
    if dtype in INTEGERS or dtype is torch.bool:
        return whole.to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (whole + torch.rand(shape, generator=source, dtype=wide)).to(dtype)


def ours(group: Group) -> bool:
    return dist.get_backend(group) == "shoal"


def other_way(group: Group, async_op: bool, call: Callable[..., Any]) -> None:
    """Make a call that waits, or one whose Work is waited for."""
    work = call(group=group, async_op=async_op)
    if async_op:
        work.wait()


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


# How many rows rank r gives to rank t: ROWS[r][t].
ROWS = [[2, 0, 1], [3, 1, 0], [0, 4, 2]]


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


# ---- several at once ----


def case_coalesced_calls(group: Group) -> Any:
    rank = group.rank()
    results: list[Tensor] = []
    for async_op in (False, True):
        folded = [given(rank, n) for n in (2, 5)]
        wholes = [torch.empty(3 * n) for n in (2, 5)]
        blocks = [torch.empty(n) for n in (2, 5)]
        managers = []
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for tensor in folded:
                dist.all_reduce(tensor, group=group)
        managers.append(manager)
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for n, whole in zip((2, 5), wholes, strict=True):
                dist.all_gather_into_tensor(whole, given(rank, n), group=group)
        managers.append(manager)
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for n, block in zip((2, 5), blocks, strict=True):
                dist.reduce_scatter_tensor(block, given(rank, 3 * n), group=group)
        managers.append(manager)
        for manager in managers:
            manager.wait()
        results += [*folded, *wholes, *blocks]
    return results


def case_mixed_calls_between_start_and_end(group: Group) -> Any:
    """What backends of devices coalesce; Gloo does it one by one."""
    rank = group.rank()
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    folded, moved, got = given(rank, 4), given(rank, 3), torch.empty(2)

    def calls() -> list[Any]:
        return [
            dist.all_reduce(folded, group=group, async_op=True) if not ours(group) else None,
            dist.isend(given(rank, 2), group_dst=right, group=group),
            dist.irecv(got, group_src=left, group=group),
            dist.broadcast(moved, group_src=1, group=group, async_op=True),
        ]

    if ours(group):
        with dist._coalescing_manager(group, torch.device("cpu")):
            dist.all_reduce(folded, group=group)
            calls()
    else:
        for work in filter(None, calls()):
            work.wait()
    return [folded, moved, got]


def case_coalesced_lists(group: Group) -> Any:
    rank = group.rank()
    folded = [given(rank, 2), given(rank, 3)]
    dist.all_reduce_coalesced(folded, group=group)
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [given(rank, 2), given(rank, 3)], group=group)
    return [*folded, *(tensor for row in outputs for tensor in row)]


# ---- objects ----


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
    told = [rank, {"from": rank}] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, group_src=0, group=group)
    passed: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], group_dst=2, group=group)
    elif rank == 2:
        assert dist.recv_object_list(passed, group_src=0, group=group) == 0
    return [everyone, at_root, dealt, told, passed]


# ---- one to one ----


def case_send_and_recv(group: Group) -> Any:
    rank = group.rank()
    got = []
    for dtype in MOVED:
        if rank == 0:
            dist.send(given(0, 5, dtype=dtype), 2, group=group)
        elif rank == 2:
            got.append(torch.empty(5, dtype=dtype))
            assert dist.recv(got[-1], 0, group=group) == 0
    return got


def case_tags(group: Group) -> Any:
    rank = group.rank()
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, group, tag) for tag in (3, 1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    got = [torch.empty(3) for _ in range(3)]
    if rank == 1:
        for tag, tensor in enumerate(got, start=1):
            dist.recv(tensor, 0, group, tag)
        return got
    return []


def case_recv_from_any_source(group: Group) -> Any:
    rank = group.rank()
    seen = []
    if rank == 0:
        for _ in range(SIZE - 1):
            tensor = torch.empty(2)
            source = dist.recv(tensor, group=group, tag=5)
            seen.append((source, tensor.tolist()))
        tensor = torch.empty(1, dtype=torch.int64)
        work = dist.irecv(tensor, group=group, tag=6)
        assert work is not None
        work.wait()
        seen.append((work.source_rank(), tensor.tolist()))
    else:
        dist.send(torch.full((2,), float(rank)), 0, group, tag=5)
        if rank == 2:
            dist.send(torch.tensor([77]), 0, group, tag=6)
    return sorted(seen)


def case_batches(group: Group) -> Any:
    rank = group.rank()
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    got = [torch.empty(2), torch.empty(2)]
    ops = [
        dist.P2POp(dist.irecv, got[0], left, group),
        dist.P2POp(dist.isend, given(rank, 2), right, group),
        dist.P2POp(dist.irecv, got[1], group=group, group_peer=right, tag=9),
        dist.P2POp(dist.isend, given(rank, 2, seed=1), group=group, group_peer=left, tag=9),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


# ---- barriers ----


def case_barriers(group: Group) -> Any:
    dist.barrier(group=group)
    dist.barrier(group=group, device_ids=[0])
    work = dist.barrier(group=group, async_op=True, timeout=timedelta(seconds=20))
    assert work is not None
    work.wait()
    group.monitored_barrier(timedelta(seconds=20))
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    if not ours(group):  # tests/process/test_torch_versions.py has whether torch lets shoal's
        dist.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=True)
    return []


# ---- works and futures ----


def case_works(group: Group) -> Any:
    tensor = given(group.rank(), 9)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert not work.exception()
    outputs = [torch.empty(2) for _ in range(SIZE)]
    gathered = dist.all_gather(outputs, given(group.rank(), 2), group=group, async_op=True)
    doubled = gathered.get_future().then(lambda done: 2 * torch.cat(done.value()[-SIZE:]).flatten())
    return [tensor, work.result()[0], doubled.wait()]


# ---- functional collectives ----


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
    return [functional.wait_tensor(result).clone() for result in results]


def case_gradients_of_functional_collectives(group: Group) -> Any:
    rank = group.rank()
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, [1] * SIZE, [1] * SIZE, group),
    ]
    results = []
    for call in calls:
        leaf = given(rank, SIZE, 2).requires_grad_()
        output = call(leaf)
        weights = given(rank, *output.shape, seed=1)
        (output * weights).sum().backward()
        results += [output.detach().clone(), leaf.grad]
    return results


# ---- groups ----


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
        results += [
            dist.get_process_group_ranks(pair),
            dist.get_group_rank(pair, 2),
            dist.get_global_rank(pair, 1),
            dist.get_rank(pair),
        ]
        moved = torch.tensor([float(group.rank())])
        dist.broadcast(moved, src=2, group=pair)
        dist.reduce(moved, dst=2, group=pair)
        results.append(moved if group.rank() == 2 else None)
    return results


def case_questions(group: Group) -> Any:
    name = dist.get_backend(group)
    assert dist.is_available()
    assert dist.is_initialized()
    assert dist.is_backend_available(name)
    assert dist.get_pg_count() >= 2
    served = "cpu:shoal" if ours(group) else "cpu:gloo,cuda:gloo"
    assert dist.get_backend_config(group) == served
    return [dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]


# ---- how they are run ----


def raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whichever: it is what is tested
        return error
    return None


def check_alike(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        tolerance = TOLERANCE.get(got.dtype, 1e-12 if got.is_floating_point() else 0)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_alike(one, other)
    else:
        assert got == expected


CASES = {
    name.removeprefix("case_"): case
    for name, case in dict(globals()).items()
    if name.startswith("case_")
}


def run_cases() -> dict[str, str]:
    """In a rank: how each case failed, "" if it did not."""
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    failures = {}
    for name, case in CASES.items():
        mine, theirs = (
            dist.new_group(backend=backend, timeout=timedelta(seconds=10))
            for backend in ("shoal", "gloo")
        )
        try:
            check_alike(case(mine), case(theirs))
            failures[name] = ""
        except Exception:  # noqa: BLE001 - the other cases go on
            failures[name] = traceback.format_exc()
        dist.barrier()  # the next case begins together, even if this one failed here only
    dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_cases, SIZE, deadline_s=110)


@pytest.mark.parametrize("case", CASES)
def test_shoal_does_what_gloo_does(failures: list[dict[str, str]], case: str) -> None:
    failed = [f"rank {rank}: {each[case]}" for rank, each in enumerate(failures) if each[case]]
    assert not failed, "\n".join(failed)
