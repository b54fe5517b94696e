"""The contract of torch.distributed over real processes: works, folds, moves and errors."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contract import torch_checks as checks
from contract.torch_checks import Group, Tensor, all_given, check_close, check_equal, folded, given
from process.shared_ranks import Case, SharedRanks, cases_in
from process.stage import error_of


def case_async_works(group: Group) -> None:
    size = group.size()
    tensors = [torch.ones(1000 * k + 1) for k in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait() is True
        if hasattr(group, "describe"):  # otherwise torch wraps ours in one that has only wait
            assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    for tensor in tensors:
        check_equal(tensor, torch.full_like(tensor, float(size)))


def case_futures_hold_the_list_of_tensors(group: Group) -> None:
    size = group.size()
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    check_equal(doubled.wait(), torch.full((10,), 2.0 * size))
    assert future.value()[0] is tensor
    at_once = dist.AllreduceOptions()
    at_once.asyncOp = False
    finished = group.allreduce([tensor], at_once).get_future()
    assert finished.done()
    assert finished.value()[0] is tensor


def case_a_callback_may_wait_for_another_future(group: Group) -> None:
    """Do as DDP's PowerSGD hook does."""
    size = group.size()

    def next_one(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = dist.all_reduce(done.value()[0], group=group, async_op=True)
        return again.get_future().wait()[0]

    future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
    check_equal(future.then(next_one).wait(), torch.full((5,), float(size * size)))


def case_async_calls_of_every_kind(group: Group) -> None:
    rank, size = group.rank(), group.size()
    outputs = [torch.empty(3) for _ in range(size)]
    whole, block = torch.empty(3 * size), torch.empty(3)
    works = [
        dist.barrier(group=group, async_op=True),
        dist.broadcast(torch.ones(2), group_src=0, group=group, async_op=True),
        dist.all_gather(outputs, torch.full((3,), float(rank)), group=group, async_op=True),
        dist.all_gather_into_tensor(whole, torch.ones(3), group=group, async_op=True),
        dist.reduce_scatter_tensor(block, torch.ones(3 * size), group=group, async_op=True),
    ]
    values = [work.get_future().wait() for work in works]
    assert [len(value) for value in values] == [0, 1, size, 1, 1]
    check_equal(torch.stack(outputs)[:, 0], torch.arange(float(size)))
    check_equal(block, torch.full((3,), float(size)))


def case_torchs_queries_about_a_group(_world: Group) -> None:
    group = dist.new_group(group_desc="a group for checks")
    assert dist.get_backend(group) == "shoal"
    assert group._get_backend(torch.device("cpu")).name() == "shoal"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert torch.device("cpu") in group._device_types
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group.group_desc == "a group for checks"
    assert not group._get_backend(torch.device("cpu")).supports_tensor_alloc("cpu")


def case_overloads_without_options(group: Group) -> None:
    size, timeout = group.size(), timedelta(seconds=5)
    tensor = torch.ones(3)
    group.allreduce(tensor, dist.ReduceOp.SUM, timeout).wait()
    group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
    group.broadcast(tensor, root=size - 1).wait()
    outputs = [torch.empty(3) for _ in range(size)]
    group.allgather(outputs, tensor, timeout=timeout).wait()
    block = torch.empty(3)
    group.reduce_scatter(block, outputs, dist.ReduceOp.AVG).wait()
    group.barrier(timeout=timeout).wait()
    check_equal(block, torch.full((3,), float(size)))


def case_meaningless_folds_are_refused(group: Group) -> None:
    for dtype, fold in ((torch.float32, "BAND"), (torch.complex64, "MAX"), (torch.bool, "AVG")):
        error = error_of(checks.reduced, group, torch.ones(2, dtype=dtype), fold)
        assert type(error).__name__ == "UsageError", repr(error)
    dist.barrier(group=group)


def case_an_aborted_group_is_closed(group: Group) -> None:
    doomed = dist.new_group(timeout=timedelta(seconds=30))
    dist.barrier(group=group)
    if group.rank() == 0:
        dist.distributed_c10d._abort_process_group(doomed)
    else:
        error = error_of(lambda: dist.all_reduce(torch.ones(1), group=doomed))
        assert type(error).__name__ == "Closed", repr(error)
    dist.barrier(group=group)


def case_all_reduce_folds_every_dtype(group: Group) -> None:
    for seed, (dtype, fold) in enumerate(checks.FOLDS):
        tensors = all_given(dtype, group, 37, seed)
        actual = checks.reduced(group, tensors[group.rank()].clone(), fold)
        check_close(actual, folded(fold, tensors))


def case_all_reduce_of_any_length(group: Group) -> None:
    for n in (0, 1, 2, 3, 4, 5, 7, 127, 4099, 100_003, 1_000_003):
        tensors = all_given(torch.float32, group, n)
        actual = tensors[group.rank()].clone()
        dist.all_reduce(actual, group=group)
        check_close(actual, folded("SUM", tensors))


def case_premul_sum_multiplies_each_ranks_contribution(group: Group) -> None:
    for factor in (0.5, torch.tensor([0.25]), torch.tensor(3.0)):
        ops = [dist._make_nccl_premul_sum(factor)]
        if hasattr(dist.ReduceOp, "factor"):  # torch >= 2.13
            ops.append(dist.ReduceOp.PREMUL_SUM(factor))
        for op in ops:
            tensors = all_given(torch.float64, group, 11)
            actual = tensors[group.rank()].clone()
            dist.all_reduce(actual, op=op, group=group)
            check_close(actual, folded("SUM", tensors) * float(factor))
            whole = torch.cat([tensors[group.rank()]] * group.size())
            before, output = whole.clone(), torch.empty(11, dtype=torch.float64)
            dist.reduce_scatter_tensor(output, whole, op=op, group=group)
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
    for seed, (dtype, fold) in enumerate(checks.FOLDS):
        n = 13
        wholes = all_given(dtype, group, n * size, seed)
        expected = folded(fold, wholes)[rank * n : (rank + 1) * n]
        blocks = list(wholes[rank].clone().split(n))
        opts = dist.ReduceScatterOptions()
        opts.reduceOp, opts.asyncOp = getattr(dist.ReduceOp, fold), bool(seed % 2)
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


def case_broadcast_of_every_dtype_from_every_root(group: Group) -> None:
    for root in range(group.size()):
        for dtype in checks.DTYPES:
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
    for dtype in checks.DTYPES:
        expected = all_given(dtype, group, 6)
        opts = dist.AllgatherOptions() if hasattr(dist, "AllgatherOptions") else None
        lists = [torch.empty(6, dtype=dtype) for _ in range(size)]
        group.allgather([lists], [expected[rank]], *([opts] if opts else [])).wait()
        check_equal(torch.cat(lists), torch.cat(expected))
        single = torch.empty(6 * size, dtype=dtype)
        group._allgather_base(single, expected[rank]).wait()
        check_equal(single, torch.cat(expected))


def case_all_gather_of_unequal_lists(group: Group) -> None:
    for lengths in checks.unequal(group):
        expected = [given(torch.float32, other, n) for other, n in enumerate(lengths)]
        lists = [torch.zeros(n) for n in lengths]
        dist.all_gather(lists, expected[group.rank()], group=group)
        check_equal(torch.cat(lists), torch.cat(expected))


def case_all_gather_of_unequal_strided_and_coalesced_lists(group: Group) -> None:
    size = group.size()
    expected = [
        [given(torch.float32, other, 3 * (other + 2)).view(-1, 3), torch.full((4,), float(other))]
        for other in range(size)
    ]
    rows = [[torch.zeros(3, other + 2).t(), torch.zeros(4)] for other in range(size)]
    dist.all_gather_coalesced(rows, expected[group.rank()], group=group)
    for row, wanted in zip(rows, expected, strict=True):
        for got, want in zip(row, wanted, strict=True):
            check_equal(got, want)


def case_reduce(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for seed, (dtype, fold) in enumerate(checks.FOLDS):
        tensors = all_given(dtype, group, 11, seed)
        actual = tensors[rank].clone()
        opts = dist.ReduceOptions()
        opts.rootRank, opts.asyncOp = seed % size, bool(seed % 3)
        opts.reduceOp = getattr(dist.ReduceOp, fold)
        group.reduce([actual], opts).wait()
        if rank == opts.rootRank:
            check_close(actual, folded(fold, tensors))
        else:
            check_equal(actual, tensors[rank])


def case_gather_scatter_and_all_to_all_of_every_dtype(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for number, dtype in enumerate([*checks.DTYPES, torch.float8_e4m3fn]):
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


def case_gather_into_one_tensor(group: Group) -> None:
    """torch 2.14 has a function for it; before, call the group itself."""
    root = group.size() - 1
    whole = torch.empty(group.size(), 4) if group.rank() == root else None
    opts = dist.GatherOptions()
    opts.rootRank = root
    group.gather_single(whole, given(torch.float32, group.rank(), 4), opts).wait()
    if whole is not None:
        check_equal(whole, torch.stack(all_given(torch.float32, group, 4)))


def case_gather_and_scatter_of_strided_tensors(group: Group) -> None:
    rank, size, root = group.rank(), group.size(), group.size() - 1
    sources = [each.view(5, size) for each in all_given(torch.float32, group, 5 * size)]
    table, output = torch.zeros(5, size), torch.zeros(4, 5)
    columns = [table[:, other] for other in range(size)] if rank == root else None
    dist.gather(sources[rank][:, 0], columns, root, group)
    parts = [sources[root][:, other] for other in range(size)] if rank == root else None
    dist.scatter(output[1], parts, root, group)
    if rank == root:
        check_equal(table, torch.stack([source[:, 0] for source in sources], dim=1))
    check_equal(output[1], sources[root][:, rank])
    assert output.count_nonzero() == 5


def case_mixed_calls_between_start_and_end(group: Group) -> None:
    """Make calls that backends of devices coalesce."""
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    folded, moved, got = torch.ones(4), torch.full((3,), float(rank)), torch.empty(2)
    with dist._coalescing_manager(group, torch.device("cpu")):
        dist.all_reduce(folded, group=group)
        dist.isend(torch.full((2,), float(rank)), group_dst=right, group=group)
        dist.irecv(got, group_src=left, group=group)
        dist.broadcast(moved, group_src=1, group=group, async_op=True)
    assert (folded.tolist(), moved.tolist()) == ([float(size)] * 4, [1.0] * 3)
    assert got.tolist() == [float(left)] * 2


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
            # Received in the reverse order of sending: the tags distinguish them.
            dist.irecv(got[1], group_src=left, group=group, tag=8),
            dist.irecv(got[0], group_src=left, group=group, tag=7),
        ]
        for work in works:
            work.wait()
        check_equal(got[0], given(torch.float32, left, n))
        check_equal(got[1], given(torch.int64, left, n))
    if rank == 0:  # and calls that block
        dist.send(torch.arange(5), group_dst=1, group=group)
    elif rank == 1:
        strided = torch.zeros(10, dtype=torch.int64)[::2]
        assert dist.recv(strided, group_src=0, group=group) == 0
        check_equal(strided, torch.arange(5))


def case_non_contiguous_tensors(group: Group) -> None:
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
    check_equal(column[:, :size], torch.arange(24.0).view(4, 6)[:, :size])
    assert bool((column[:, size:] == -1).all())


def case_lazily_conjugated_and_negated_tensors(group: Group) -> None:
    if not hasattr(group, "describe"):
        return  # torch's own group resolves them before us, and drops the result
    size = group.size()
    value = torch.tensor([1 + 2j, 3 - 1j])
    check_equal(checks.reduced(group, value.clone().conj()).resolve_conj(), value.conj() * size)
    negated = torch.imag(value.clone().conj())
    assert negated.is_neg()
    check_equal(checks.reduced(group, negated).resolve_neg(), -value.imag * size)


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
