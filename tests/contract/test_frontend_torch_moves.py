"""What torch.distributed promises of moves, and of tensors of all kinds, over real processes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
from contract.torch_checks import (
    DTYPES,
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


def case_broadcast_of_every_dtype_from_every_root(group: Group) -> None:
    for root in range(group.size()):
        for dtype in DTYPES:
            tensor = given(dtype, group.rank(), 9, root)
            opts = dist.BroadcastOptions()
            opts.rootRank, opts.asyncOp = root, root % 2 == 1
            group.broadcast([tensor], opts).wait()
            check_equal(tensor, given(dtype, root, 9, root))
    eighth = torch.full((5,), float(group.rank()), dtype=torch.float32).to(torch.float8_e4m3fn)
    group.broadcast([eighth]).wait()
    assert eighth.float().tolist() == [0.0] * 5


def case_all_gather(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for dtype in DTYPES:
        expected = all_given(dtype, group, 6)
        opts = dist.AllgatherOptions() if hasattr(dist, "AllgatherOptions") else None
        lists = [torch.empty(6, dtype=dtype) for _ in range(size)]
        group.allgather([lists], [expected[rank]], *([opts] if opts else [])).wait()
        for got, want in zip(lists, expected, strict=True):
            check_equal(got, want)
        single = torch.empty(6 * size, dtype=dtype)
        group._allgather_base(single, expected[rank]).wait()
        for block, want in zip(single.split(6), expected, strict=True):
            check_equal(block, want)


def case_all_gather_from_its_own_output(group: Group) -> None:
    rank, size = group.rank(), group.size()
    expected = torch.cat(all_given(torch.float32, group, 8))
    output = torch.zeros(8 * size)
    mine = output[rank * 8 : (rank + 1) * 8]  # as FSDP does it
    mine.copy_(given(torch.float32, rank, 8))
    dist.all_gather_into_tensor(output, mine, group=group)
    check_equal(output, expected)


def case_coalesced_all_gathers(group: Group) -> None:
    rank, size = group.rank(), group.size()
    inputs = [torch.full((k,), float(rank)) for k in (1, 4)]
    outputs = [[torch.empty(k) for k in (1, 4)] for _ in range(size)]
    group.allgather_coalesced(outputs, inputs).wait()
    singles = [torch.empty(k * size) for k in (1, 4)]
    group.allgather_into_tensor_coalesced(singles, inputs).wait()
    for other in range(size):
        for i, k in enumerate((1, 4)):
            check_equal(outputs[other][i], torch.full((k,), float(other)))
            check_equal(singles[i].view(size, k)[other], torch.full((k,), float(other)))


def case_reduce(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for seed, (dtype, fold) in enumerate(FOLDS):
        tensors = all_given(dtype, group, 11, seed)
        actual = tensors[rank].clone()
        opts = dist.ReduceOptions()
        opts.rootRank, opts.reduceOp, opts.asyncOp = seed % size, op_of(fold), bool(seed % 3)
        group.reduce([actual], opts).wait()
        if rank == opts.rootRank:
            check_close(actual, folded(fold, tensors))
        else:
            check_equal(actual, tensors[rank])


def case_gather_scatter_and_all_to_all_of_every_dtype(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for number, dtype in enumerate([*DTYPES, torch.float8_e4m3fn]):
        root, known = number % size, torch.uint8 if dtype is torch.float8_e4m3fn else dtype
        tables = [given(known, other, 3 * size, number).view(dtype) for other in range(size)]
        mine = list(tables[rank].clone().split(3))
        gathered = [torch.empty(3, dtype=dtype) for _ in range(size)] if rank == root else []
        group.gather([gathered] if gathered else [], [mine[0]], root).wait()
        scattered, swapped = torch.empty(3, dtype=dtype), torch.empty(3 * size, dtype=dtype)
        group.scatter([scattered], [mine] if rank == root else [], root).wait()
        group.alltoall(list(swapped.split(3)), mine).wait()
        single = torch.empty_like(swapped)
        group.alltoall_base(single, tables[rank].clone(), [], []).wait()
        for other, block in enumerate(gathered):
            check_equal(block.view(known), tables[other][:3].view(known))
        check_equal(scattered.view(known), tables[root][3 * rank :][:3].view(known))
        expected = torch.cat([table[3 * rank :][:3].view(known) for table in tables])
        check_equal(swapped.view(known), expected)
        check_equal(single.view(known), expected)


def case_send_and_recv(group: Group) -> None:
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    for n in (0, 1, 1000, 300_000):
        got = [torch.empty(n), torch.empty(n, dtype=torch.int64)]
        works = [
            dist.isend(given(torch.float32, rank, n), group_dst=right, group=group, tag=7),
            dist.isend(given(torch.int64, rank, n), group_dst=right, group=group, tag=8),
            # In the other order than they were sent: the tags tell them apart.
            dist.irecv(got[1], group_src=left, group=group, tag=8),
            dist.irecv(got[0], group_src=left, group=group, tag=7),
        ]
        for work in works:
            assert work is not None
            work.wait()
        check_equal(got[0], given(torch.float32, left, n))
        check_equal(got[1], given(torch.int64, left, n))


def case_blocking_send_and_recv(group: Group) -> None:
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    if rank == 0:
        dist.send(torch.arange(5), group_dst=1, group=group)
    elif rank == 1:
        strided = torch.zeros(10, dtype=torch.int64)[::2]
        assert dist.recv(strided, group_src=0, group=group) == 0 or True
        check_equal(strided, torch.arange(5))


# ---- tensors of all kinds ----


def case_tensors_that_are_not_contiguous(group: Group) -> None:
    rank, size = group.rank(), group.size()
    total = float(sum(range(1, size + 1)))
    base = torch.arange(24.0).view(4, 6) * (rank + 1)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 1:4], lambda t: t[2, 3]):
        for async_op in (False, True):
            tensor = base.clone()
            work = dist.all_reduce(view(tensor), group=group, async_op=async_op)
            if work is not None:
                work.wait()
            expected = base.clone()
            view(expected).copy_(view(base / (rank + 1)) * total)
            check_equal(tensor, expected)
    column = torch.full((4, 6), -1.0)
    outputs = [column[:, i] for i in range(size)]
    dist.all_gather(outputs, (base / (rank + 1))[:, rank], group=group)
    for i in range(size):
        check_equal(column[:, i].contiguous(), torch.arange(24.0).view(4, 6)[:, i].contiguous())
    assert bool((column[:, size:] == -1).all())


def case_lazily_conjugated_and_negated_tensors(group: Group) -> None:
    if not hasattr(group, "describe"):
        return  # torch's own group resolves them before us, and drops the result
    size = group.size()
    value = torch.tensor([1 + 2j, 3 - 1j])
    check_equal(reduced(group, value.clone().conj()).resolve_conj(), value.conj() * size)
    negated = torch.imag(value.clone().conj())
    assert negated.is_neg()
    check_equal(reduced(group, negated).resolve_neg(), -value.imag * size)


def case_leaves_that_require_grad(group: Group) -> None:
    leaf = torch.ones(4, 2, requires_grad=True)
    strided = torch.ones(8, requires_grad=True)
    dist.broadcast(leaf, group_src=0, group=group)
    with torch.no_grad():
        dist.all_reduce(strided[::2], group=group)
    assert strided.tolist() == [float(group.size()), 1.0] * 4
    assert leaf.is_leaf


def in_rank(case: str) -> None:
    globals()[case](dist.group.WORLD)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_torch(case: Case, one_or_three_ranks: SharedRanks) -> None:
    one_or_three_ranks.run(in_rank, case.__name__)
