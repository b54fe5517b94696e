"""Calls on tensors that claim to be on cuda:0: every order of copies and calls, and refusals.

A fake cannot show more; process/test_torch_staged.py makes every call over real ranks.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from unit.fake_device import FakeDevice, FakeStream, FakeWire, OnOtherDevice, on_device, plain

from shoal.errors import Closed, PeerLost, TimedOut, UsageError
from shoal.frontend.torch.gpu import device as devices
from shoal.frontend.torch.gpu import pieces
from shoal.frontend.torch.gpu.calls import DeviceCalls
from shoal.frontend.torch.gpu.device import Device, device_at
from shoal.frontend.torch.gpu.staging import StagedCall
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import ShoalProcessGroup, takes_backends

LOST = PeerLost(0, "spruce", doing="recv 8 B")
LINE = 32  # elements of a piece: 128 bytes of float32


class ByHand:
    """Stands in for Staging: posts when the test steps it, in the order of the calls."""

    def __init__(self) -> None:
        self.waiting: deque[StagedCall] = deque()

    def post(self, call: StagedCall, timeout_s: float) -> None:
        self.waiting.append(call)

    def can_post(self) -> bool:
        """True if the next call of the line may have a piece to post."""
        if not self.waiting:
            return False
        call = self.waiting[0]
        left = call._pieces[call._n_begun :]
        return not left or call._error is not None or left[0].copied.passed

    def poll(self) -> None:
        if self.waiting and self.waiting[0].post_copied():
            self.waiting.popleft()

    def flush(self) -> None:
        assert not self.waiting


class Rank:
    """Rank 1 of 2, whose pieces have a line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FakeDevice()
        self.wire = FakeWire(self.device)
        monkeypatch.setattr(devices, "device_at", lambda place: self.device)
        monkeypatch.setattr(pieces, "PIECE_BYTES", LINE * 4)
        self.operations = Operations(self.wire, timedelta(seconds=60))  # type: ignore[arg-type]


class Table(Rank):
    """A rank whose posting thread is stepped too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.line = ByHand()
        calls = self.operations._devices = DeviceCalls(self.wire, None)  # type: ignore[arg-type]
        calls._staging = self.line  # type: ignore[assignment]
        self.may_lose = False
        self.calls_back_at_once = False

    def actions(self) -> list[Callable[[], object]]:
        """Return the possible actions: copy, end a call, call back, post copied pieces."""
        may: list[Callable[[], object]] = []
        may += [lambda stream=stream: self.device.step(stream) for stream in self.device.ready()]
        may += [call.finish for call in self.wire.under_way()]
        ended = [call for call in self.wire.calls if call.is_done and call.callbacks]
        if self.calls_back_at_once and ended:
            return [ended[0].call_back]
        may += [call.call_back for call in ended]
        if self.line.can_post():
            may.append(self.line.poll)
        if self.may_lose and self.wire.lost is None:
            may.append(lambda: self.wire.lose(LOST))
        return may

    def play(self, choose: Callable[[int], int], meanwhile: Callable[[], object]) -> None:
        """Do one action at a time, chosen among the possible ones."""
        while actions := self.actions():
            actions[choose(len(actions))]()
            meanwhile()


Game = Callable[[Callable[[int], int]], None]


def all_orders(game: Game) -> int:
    """Play the game in every possible order; return their number."""
    order: list[list[int]] = []  # each choice so far, and its number of actions
    n_orders = n_chosen = 0

    def choose(n: int) -> int:
        nonlocal n_chosen
        if n_chosen == len(order):
            order.append([0, n])
        n_chosen += 1
        return order[n_chosen - 1][0]

    while True:
        n_chosen = 0
        game(choose)
        n_orders += 1
        while order and order[-1][0] == order[-1][1] - 1:
            order.pop()
        if not order:
            return n_orders
        order[-1][0] += 1


def in_background(options: Any) -> Any:
    options.asyncOp = True
    return options


class Reduced:
    """An all-reduce in a game: one kernel writes it, one reads it, and one overwrites it."""

    def __init__(self, table: Table, n: int, first: float) -> None:
        self.device = table.device
        self.made = first + torch.arange(float(n))
        self.tensor = on_device(torch.full((n,), -1.0))
        self.seen: list[list[float]] = []
        self.raised: list[BaseException] = []
        self.device.kernel(lambda: plain(self.tensor).copy_(self.made))
        options = in_background(dist.AllreduceOptions())
        self.work: Any = table.operations.allreduce([self.tensor], options)
        self.waited = False

    def expected(self) -> list[float]:
        return (self.made * 2 + 3).tolist()  # type: ignore[no-any-return]

    def look(self) -> None:
        """Once wait would not block: wait, read the result, and reuse the memory."""
        if self.waited or not self.work.works[0].done():
            return
        self.waited = True
        try:
            self.work.wait()
        except (PeerLost, Closed, RuntimeError) as error:
            self.raised.append(error)
        memory = plain(self.tensor)
        self.device.kernel(lambda: self.seen.append(memory.tolist()))
        self.device.kernel(memory.zero_)


def check_nothing_is_left(table: Table) -> None:
    device = table.device
    assert not table.line.waiting
    assert not table.wire.under_way()
    assert not device.pending()
    assert device.n_blocks_held() == 0
    assert device.used <= device.kept


@pytest.mark.parametrize("n_elems", [3, 2 * LINE, LINE + 5])
def test_an_all_reduce_is_right_in_any_order(n_elems: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def game(choose: Callable[[int], int]) -> None:
        table = Table(monkeypatch)
        call = Reduced(table, n_elems, 5.0)
        table.play(choose, call.look)
        assert call.seen == [call.expected()]
        assert not call.tensor.any()  # no copy arrived after the wait
        check_nothing_is_left(table)

    n_orders = all_orders(game)
    assert n_orders == 1 if n_elems == 3 else n_orders > 10


def test_calls_are_posted_in_order_however_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[str] = set()

    def game(choose: Callable[[int], int]) -> None:
        table = Table(monkeypatch)
        table.calls_back_at_once = True
        calls = [Reduced(table, 3, 1.0), Reduced(table, 5, 2.0)]

        def look() -> None:
            for call in calls:
                call.look()
            if not table.wire.calls and table.line.waiting[-1]._pieces[0].copied.passed:
                reached.add("the second was copied before the first was posted")

        table.play(choose, look)
        assert [call.seen for call in calls] == [[call.expected()] for call in calls]
        assert [len(call.read_at_first[0]) for call in table.wire.calls] == [12, 20]
        check_nothing_is_left(table)

    assert all_orders(game) > 100
    assert reached


def test_a_peer_lost_at_any_moment_leaves_no_work_running(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: set[tuple[int, bool]] = set()

    def game(choose: Callable[[int], int]) -> None:
        table = Table(monkeypatch)
        table.may_lose = True
        call = Reduced(table, 2 * LINE, 5.0)
        table.play(choose, call.look)
        assert call.waited
        if call.raised:
            assert call.raised == [LOST]
        else:
            assert call.seen == [call.expected()]
        assert not call.tensor.any()
        check_nothing_is_left(table)
        ends.add((len(table.wire.calls), bool(call.raised)))

    all_orders(game)
    assert ends == {(0, True), (1, True), (2, True), (2, False)}


def test_waiting_does_not_wait_for_the_copies_back(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    call = Reduced(table, 2 * LINE, 1.0)
    device = table.device
    device.run_dry()
    table.line.poll()
    for posted in table.wire.calls:
        posted.finish()
        posted.call_back()
    call.work.wait()
    assert len(device.pending()) == 2
    assert plain(call.tensor).tolist() == call.made.tolist()
    memory = plain(call.tensor)
    device.kernel(lambda: call.seen.append(memory.tolist()))
    assert device.current not in device.ready()  # they go on behind the wait
    device.run_dry()
    assert call.seen == [call.expected()]


def test_a_copy_back_waits_for_kernels_reading_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    output, given = on_device(torch.full((2 * LINE,), 7.0)), on_device(torch.ones(LINE))
    seen: list[float] = []
    table.device.kernel(lambda: seen.append(float(plain(output).sum())))
    options = in_background(AllgatherOptions())
    table.operations.all_gather_single(output, given, options)
    reader = table.device.current
    streams: list[FakeStream] = [s for s in table.device.ready() if s is not reader]
    assert streams == []  # not even the copy out: a stream runs in order
    table.play(lambda n: n - 1, lambda: None)
    assert seen == [7.0 * 2 * LINE]
    assert plain(output).tolist() == [4.0] * LINE + [1.0] * LINE


def test_a_device_that_fails_in_mid_call_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    call = Reduced(table, 2 * LINE, 1.0)
    table.device.run_dry()
    table.line.poll()
    table.wire.calls[0].finish()
    table.device.fails = True
    table.wire.calls[0].call_back()
    assert not call.work.is_completed()  # the other piece is on the wire
    table.wire.calls[1].finish()
    table.wire.calls[1].call_back()
    assert call.work.is_completed()
    assert not call.work.is_success()
    with pytest.raises(RuntimeError, match="the device has failed"):
        call.work.wait()


# ---- with the posting thread; calls of the wire end when posted ----


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(monkeypatch)
    yield rank
    rank.operations.shutdown()
    assert rank.device.used <= rank.device.kept
    assert not [t for t in threading.enumerate() if t.name.startswith("shoal-staging")]


def finish(rank: Rank, work: Any) -> list[torch.Tensor]:
    """Return the result of a work, once the device and the wire have finished."""
    while not work.is_completed():
        rank.device.run_dry()
        rank.operations._flush()
        for call in rank.wire.under_way():
            call.finish()
        for call in rank.wire.calls:
            call.call_back()
    work.wait()
    rank.device.run_dry()
    return work.result()


def numbered(*shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (1 + torch.arange(float(n))).reshape(shape)


N = 200  # elements: two pieces, or four where there are two blocks


def _one() -> torch.Tensor:
    return numbered(N)


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


@pytest.mark.parametrize(
    ("n_elems", "lengths"), [(515, [512, 512, 512, 512, 12]), (140, [384, 176])]
)
def test_pieces_are_even_and_begin_at_cache_lines(
    n_elems: int, lengths: list[int], rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 512)
    finish(rank, rank.operations.allreduce([on_device(numbered(n_elems))]))
    assert [len(call.read_at_first[0]) for call in rank.wire.calls] == lengths


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
    finish(rank, first)


def test_a_work_of_coalesced_calls_has_the_devices_of_all_calls(rank: Rank) -> None:
    rank.operations.start_coalescing()
    tensors = [numbered(4), on_device(numbered(3)), on_device(numbered(5))]
    for tensor in tensors:
        rank.operations.allreduce([tensor])
    work: Any = rank.operations.end_coalescing()
    finish(rank, work)
    assert [plain(each)[0].item() for each in tensors] == [5.0] * 3
    assert work.get_future().wait() == tensors
    assert rank.device.futures_of == [[rank.device]]


@pytest.mark.parametrize("make", [_one, lambda: numbered(4, 50).t()])
def test_any_thread_writes_tensors_of_inference_mode(make: Callable[[], Any], rank: Rank) -> None:
    with torch.inference_mode():
        tensor = on_device(make().clone(memory_format=torch.preserve_format))
        work: Any = rank.operations.allreduce([tensor])
    finish(rank, work)
    assert plain(tensor).tolist() == (make() * 2 + 3).tolist()


def test_tensors_of_several_devices_in_one_call_are_refused(rank: Rank) -> None:
    here, there = on_device(_one()), on_device(_one(), OnOtherDevice)
    calls = {
        "cpu, cuda:0": lambda: rank.operations.all_gather_single(numbered(2 * N), here),
        "cuda:0, cuda:1": lambda: rank.operations.allgather([[here, there]], [on_device(_one())]),
    }
    for places, call in calls.items():
        words = r"^all_gather in group 'fake' \(rank 1 of 2\) takes tensors of one device, not of "
        with pytest.raises(UsageError, match=f"{words}{places}$"):
            call()
    with pytest.raises(UsageError, match="of one device, not of cpu, cuda:0"):
        rank.operations.allreduce_coalesced([_one(), here])
    assert not rank.wire.calls
    assert not rank.device.blocks


def test_a_stuck_device_ends_the_group_at_the_deadline(rank: Rank) -> None:
    rank.device.kernel(lambda: None)  # never stepped
    work: Any = rank.operations.allreduce([on_device(_one())], timeout=timedelta(milliseconds=1))
    words = r"all_reduce in group 'fake' \(rank 1 of 2\): after 0.001 s its tensors had not been "
    words += "copied to the host; look at what the device is doing$"
    with pytest.raises(TimedOut, match=words):
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
    assert plain(finish(rank, work)[0]).tolist() == (_one() * 2 + 3).tolist()


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
