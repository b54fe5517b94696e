"""Ranks that are threads, as in torchft's tests; threads that cannot start; and exit."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ranks import on_ranks, run_ranks
from process.shared_ranks import Case, SharedRanks, cases_in
from process.stage import error_of
from torch._C._distributed_c10d import AllgatherOptions

from shoal.frontend.torch import create_process_group, sparse

SIZE = 3
# Longer than the ranks may run, so no returned error comes from a deadline.
TIMEOUT = timedelta(seconds=600)


def all_reduce(group: Any, rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor.item()


def all_gather(group: Any, rank: int) -> float:
    outputs = [torch.zeros(1) for _ in range(group.size())]
    group.allgather([outputs], [torch.tensor([rank + 1.0])], AllgatherOptions()).wait()
    return sum(output.item() for output in outputs)


def after_a_barrier(group: Any, rank: int) -> float:
    group.barrier(dist.BarrierOptions()).wait()
    return all_reduce(group, rank)


def with_a_future(group: Any, rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    work = group.allreduce([tensor], dist.AllreduceOptions())
    return float(work.get_future().wait()[0].item())


def form(store: dist.Store, rank: int, size: int) -> Any:
    """Form a shoal group outside torch's default group, as torchft does."""
    place = {"store": store, "group_rank": rank, "group_size": size, "global_ranks_in_group": []}
    made = create_process_group(SimpleNamespace(**place, group_id="threads", timeout=TIMEOUT))
    if isinstance(made, dist.ProcessGroup):
        return made
    group = dist.ProcessGroup(store, rank, size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    group._register_backend(torch.device("cpu"), custom, made)
    return group


def form_on(threads: ThreadPoolExecutor, size: int) -> list[Any]:
    store = dist.HashStore()
    return list(threads.map(lambda rank: form(store, rank, size), range(size)))


def call_on(
    threads: ThreadPoolExecutor, call: Callable[..., float], groups: list[Any]
) -> list[float]:
    return list(threads.map(call, groups, range(len(groups))))


@on_ranks(1)
def test_ranks_go_on_in_a_new_group_after_one_dropped_the_old() -> None:
    gc.disable()  # so that garbage stays uncollected
    for call in (all_reduce, all_gather, after_a_barrier, with_a_future):
        with ThreadPoolExecutor(SIZE) as threads:
            groups = form_on(threads, SIZE)
            assert call_on(threads, call, groups) == [6.0] * 3
            del groups[-1]
            for error in threads.map(error_of, [call] * 2, groups, range(2)):
                assert "PeerLost" in repr(error), error
                assert "2" in repr(error), error
            groups.clear()
            assert call_on(threads, call, form_on(threads, SIZE - 1)) == [3.0] * 2


@on_ranks(1)
def test_ranks_go_on_in_a_new_group_after_one_aborted_the_old() -> None:
    with ThreadPoolExecutor(SIZE) as threads:
        groups = form_on(threads, SIZE)
        call_on(threads, all_reduce, groups)
        works = [group.allreduce([torch.ones(1)], dist.AllreduceOptions()) for group in groups[1:]]
        futures = [work.get_future() for work in works]
        backend = groups[0]
        if not hasattr(backend, "group"):
            backend = backend._get_backend(torch.device("cpu"))
        backend.abort()
        for each in (*works, *futures):
            assert "aborted the process group" in repr(error_of(each.wait))
        groups.clear()
        del works, futures, backend
        assert call_on(threads, all_reduce, form_on(threads, SIZE)) == [6.0] * 3


def reduce_by_a_file(path: Path) -> tuple[float, bytes]:
    """Meet by a file that holds the leftovers of a killed job."""
    rank, data = dist.get_rank(), torch.ones(1)
    dist.destroy_process_group()
    dist.init_process_group("shoal", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.all_reduce(data)
    return data.item(), path.read_bytes()


def test_a_file_left_by_an_earlier_job_serves_the_next(tmp_path: Path, ranks: SharedRanks) -> None:
    path = tmp_path / "store"
    for _ in range(2):
        results = ranks.run(reduce_by_a_file, path)
        assert [summed for summed, _ in results] == [2.0, 2.0]
        left = max((file for _, file in results), key=len)
        assert left
        path.write_bytes(left)


def train_when_the_main_thread_has_ended(folder: Path) -> None:
    def train() -> None:
        threading.main_thread().join()
        dist.init_process_group("shoal")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        (folder / str(dist.get_rank())).write_text(str(model.module.weight.grad.item()))
        dist.destroy_process_group()

    threading.Thread(target=train).start()


def test_a_thread_trains_on_after_the_main_script_ended(tmp_path: Path) -> None:
    run_ranks(train_when_the_main_thread_has_ended, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1.5", "1.5"]


def case_threads_that_first_use_devices_at_once_share_an_order() -> None:
    group: Any = dist.group.WORLD
    if not hasattr(group, "_on_devices"):
        group = group._get_backend(torch.device("cpu"))
    meeting = threading.Barrier(4)

    def prepare(_: int) -> object:
        meeting.wait()
        return group._on_devices()

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(prepare, range(4)))) == 1


def case_thousands_of_futures_complete_without_a_wait_for_their_works() -> None:
    tensors = [torch.ones(1) for _ in range(3_000)]
    calls = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [call.get_future() for call in calls]
    del calls
    torch.futures.wait_all(futures)
    assert torch.cat(tensors).tolist() == [2.0] * 3_000


def case_more_than_64_sparse_tensors_in_flight_are_not_mixed_up() -> None:
    """The first call of one rank waits until all are under way; it shares names with the 65th."""
    are_given, plain = threading.Event(), sparse.all_reduce_sparse

    def late(*given: Any, name: str, **how: Any) -> None:
        if dist.get_rank() == 1 and name.endswith("/1"):
            assert are_given.wait(60)
        plain(*given, name=name, **how)

    tensors = [torch.full((2,), float(k)).to_sparse() for k in range(1, 150)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "all_reduce_sparse", late)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        are_given.set()
        for work in works:
            work.wait()
    assert [one.to_dense().tolist() for one in tensors] == [[2.0 * k] * 2 for k in range(1, 150)]


@pytest.mark.parametrize("case", cases_in(globals()))
def test_threads(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
