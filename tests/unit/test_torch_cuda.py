"""Calls on tensors that claim to be on cuda:0: copies, their times, and refusals.

A fake cannot show more; process/test_torch_staged.py makes every call over real ranks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unit.fake_device import FakeDevice, FakeWire, OnOtherDevice, on_device, plain

from shoal.errors import Closed, TimedOut, UsageError
from shoal.frontend.torch.gpu import device as devices
from shoal.frontend.torch.gpu import pieces
from shoal.frontend.torch.gpu.device import Device, device_at
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import ShoalProcessGroup, takes_backends

Tensors = list[torch.Tensor]
RANK = 1


class Rank:
    """Rank 1 of 2, with the posting thread; calls of the wire end when posted."""

    def __init__(self, index: int = 0) -> None:
        self.device = FakeDevice(index)
        self.wire = FakeWire(self.device)
        self.operations = Operations(self.wire, timedelta(seconds=60))  # type: ignore[arg-type]

    def finish(self, work: Any) -> Tensors:
        """Return the result of a work, once the device and the wire have finished."""
        while not work.is_completed():
            self.device.run_dry()
            self.operations._flush()
            for call in self.wire.under_way():
                call.finish()
            for call in self.wire.calls:
                call.call_back()
        work.wait()
        self.device.run_dry()
        tensors: Tensors = work.result()
        return tensors


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    rank = Rank()
    monkeypatch.setattr(devices, "device_at", lambda place: rank.device)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 512)
    yield rank
    rank.operations.shutdown()
    assert rank.device.used <= rank.device.kept
    assert not [t for t in threading.enumerate() if t.name.startswith("shoal-staging")]


def numbered(*shape: int, first: float = 1.0) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (first + torch.arange(float(n))).reshape(shape)


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


N = 200  # elements: two pieces, or four where there are two blocks


def _one() -> torch.Tensor:
    return numbered(N)


def _whole() -> torch.Tensor:
    return numbered(2 * N, first=500.0)


def _columns() -> torch.Tensor:
    return numbered(4, 50).t()


_COLLECTIVE = re.compile("all|reduce|gather|scatter|broadcast|send|recv|barrier")


@pytest.mark.skipif(takes_backends(), reason="later ones keep old names that torch does not call")
def test_every_collective_that_torch_has_is_served_on_cuda_tensors() -> None:
    """Otherwise torch would pass some to another backend, such as NCCL."""
    names = {
        name for name in dir(dist.ProcessGroup) if _COLLECTIVE.search(name) and "__" not in name
    }
    names -= {"allocate_tensor", "supports_tensor_alloc", "mem_allocator"}  # of memory
    assert {"allreduce", "alltoall", "send"} <= names
    served = set(map(id, vars(Operations).values()))
    assert [name for name in names if id(getattr(ShoalProcessGroup, name)) not in served] == []


# ---- copies and order ----


def test_pieces_are_even_begin_at_cache_lines_and_are_equal_for_lists(rank: Rank) -> None:
    rank.finish(rank.operations.allreduce([on_device(numbered(4 * 128 + 3))]))
    lengths = [len(call.read_at_first[0]) for call in rank.wire.calls]
    assert lengths == [512, 512, 512, 512, 12]
    rank.wire.calls.clear()
    rank.finish(rank.operations.allreduce([on_device(numbered(140))]))
    assert [len(call.read_at_first[0]) for call in rank.wire.calls] == [384, 176]
    rank.wire.calls.clear()
    rank.finish(
        rank.operations.allgather([[on_device(_one()), on_device(_one())]], [on_device(_one())])
    )
    rank.finish(rank.operations.all_gather_single(on_device(_whole()), on_device(_one())))
    lengths = [len(call.read_at_first[0]) for call in rank.wire.calls]
    assert lengths[:4] == lengths[4:]


def test_only_read_memory_is_copied_out_and_only_written_memory_back(rank: Rank) -> None:
    own, other = (rooted(dist.BroadcastOptions, root) for root in (RANK, 0))
    operations = rank.operations
    expected: dict[Callable[[], Any], int] = {
        lambda: operations.broadcast([on_device(_one())], own): 2,
        lambda: operations.broadcast([on_device(_one())], other): 2,
        lambda: operations.reduce([on_device(_one())], 0): 2,
        lambda: operations.reduce([on_device(_one())], RANK): 4,
        lambda: operations.allreduce([on_device(_one())]): 4,
        lambda: operations.send([on_device(_one())], 0, 3): 1,
        lambda: operations.all_gather_single(on_device(_whole()), on_device(_one())): 12,
    }
    for call, n_copies in expected.items():
        rank.device.n_copies = 0
        rank.finish(call())
        assert rank.device.n_copies == n_copies


def test_the_calls_of_a_rank_keep_their_order_on_any_device(rank: Rank) -> None:
    rank.device.kernel(lambda: None)
    first = rank.operations.send([on_device(numbered(3))], 0, 7)
    posted: list[int] = []

    def send() -> None:
        rank.operations.send([numbered(5)], 0, 7)
        posted.append(len(rank.wire.calls))

    other = threading.Thread(target=send)
    other.start()
    assert not rank.wire.calls
    rank.device.run_dry()  # only now the first call is copied
    other.join()
    assert posted == [2]
    assert [len(call.read_at_first[0]) for call in rank.wire.calls] == [12, 20]
    rank.finish(first)


def test_a_work_of_coalesced_calls_has_the_devices_of_all_calls(rank: Rank) -> None:
    rank.operations.start_coalescing()
    tensors = [numbered(4), on_device(numbered(3)), on_device(numbered(5))]
    for tensor in tensors:
        rank.operations.allreduce([tensor])
    work: Any = rank.operations.end_coalescing()
    rank.finish(work)
    assert [plain(each)[0].item() for each in tensors] == [5.0] * 3
    assert work.get_future().wait() == tensors
    assert rank.device.futures_of == [[rank.device]]


@pytest.mark.parametrize("make", [_one, _columns])
def test_any_thread_may_write_tensors_of_inference_mode(
    make: Callable[[], torch.Tensor], rank: Rank
) -> None:
    with torch.inference_mode():
        tensor = on_device(make().clone(memory_format=torch.preserve_format))
        work: Any = rank.operations.allreduce([tensor])
    rank.finish(work)
    assert plain(tensor).tolist() == (make() * 2 + 3).tolist()


# ---- refusals and failures ----


def test_tensors_of_several_devices_in_one_call_are_refused(rank: Rank) -> None:
    here, there = on_device(_one()), on_device(_one(), OnOtherDevice)
    calls = {
        "cpu, cuda:0": lambda: rank.operations.all_gather_single(_whole(), here),
        "cuda:0, cuda:1": lambda: rank.operations.allgather([[here, there]], [on_device(_one())]),
    }
    for places, call in calls.items():
        with pytest.raises(
            UsageError,
            match=r"^all_gather in group 'fake' \(rank 1 of 2\) takes tensors of one device, "
            f"not of {places}$",
        ):
            call()
    with pytest.raises(UsageError, match="of one device, not of cpu, cuda:0"):
        rank.operations.allreduce_coalesced([_one(), here])
    assert not rank.wire.calls
    assert not rank.device.blocks


def test_a_stuck_device_ends_the_group_at_the_deadline(rank: Rank) -> None:
    rank.device.kernel(lambda: None)  # never stepped
    work: Any = rank.operations.allreduce([on_device(_one())], timeout=timedelta(milliseconds=1))
    with pytest.raises(
        TimedOut,
        match=r"all_reduce in group 'fake' \(rank 1 of 2\): after 0.001 s its tensors had not been "
        "copied to the host; look at what the device is doing$",
    ):
        work.wait()
    assert len(rank.wire.aborted) == 1
    assert "had not been copied to the host" in rank.wire.aborted[0]
    assert not rank.wire.calls
    rank.operations._flush()


def test_a_wait_that_is_too_short_raises_and_the_call_goes_on(rank: Rank) -> None:
    rank.device.kernel(lambda: None)
    work: Any = rank.operations.allreduce([on_device(_one())])
    with pytest.raises(TimedOut, match="this wait was too short; the call goes on"):
        work.wait(timedelta(microseconds=1))
    assert plain(rank.finish(work)[0]).tolist() == (_one() * 2 + 3).tolist()


def test_a_device_that_fails_ends_the_group_and_the_call(rank: Rank) -> None:
    rank.device.kernel(lambda: None)
    work: Any = rank.operations.allreduce([on_device(_one())])
    future = work.get_future()
    rank.device.fails = True
    with pytest.raises(RuntimeError, match="the device has failed"):
        work.wait()
    with pytest.raises(RuntimeError, match="the device has failed"):
        future.wait()
    rank.operations._flush()
    assert rank.wire.aborted == ["all_reduce in group 'fake' (rank 1 of 2): the device has failed"]


def test_closing_fails_unposted_calls_and_ends_the_thread(rank: Rank) -> None:
    rank.device.kernel(lambda: None)
    works: list[Any] = [rank.operations.allreduce([on_device(_one())]) for _ in range(2)]
    rank.operations.shutdown()
    for work in works:
        with pytest.raises(Closed, match="the group was closed or aborted"):
            work.wait()
    with pytest.raises(Closed, match="the group was closed or aborted"):
        rank.operations.allreduce([on_device(_one())])
    assert rank.wire.closed


# ---- devices reported to torch ----


@pytest.mark.parametrize(
    ("has_gpu", "served", "refused"),
    [(True, ["cpu", "cuda"], "cpu and cuda, not xpu"), (False, ["cpu"], "cpu, not xpu")],
)
def test_the_group_serves_cuda_where_there_is_a_gpu(
    has_gpu: bool, served: list[str], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    made = ShoalProcessGroup(FakeWire(), dist.HashStore(), timedelta(1))  # type: ignore[arg-type]
    assert sorted(each.type for each in made._device_types) == served
    for kind in served:
        assert made._get_backend(torch.device(kind)) is made
    assert dist.distributed_c10d._get_object_coll_device(made) == "cpu"
    with pytest.raises(RuntimeError, match=f"serves {refused}"):
        made._get_backend("xpu")


def test_only_tensors_of_cuda_are_served() -> None:
    device = device_at(torch.device("cuda", 1))
    assert isinstance(device, Device)
    assert device_at(torch.device("cuda", 1)) is device
    assert device_at(torch.device("meta")) is None
