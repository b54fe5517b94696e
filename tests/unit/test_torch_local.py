"""All-reduces with a part for the GPUs of a host: in every order of GPUs, copies and wire.

The GPUs of the host are a fake, as the device is: this rank is at place 1 of 2, on one of two
hosts. What the other brings is what this one brings and 3 more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from unit.fake_device import FakeDevice, FakeWire, OnOtherDevice, on_device
from unit.fake_host import ELSEWHERE, SIZE, FakeCollectives, HostOrder, NoThread
from unit.test_torch_staging import (
    LINE,
    LOST,
    ByHand,
    Player,
    Reduced,
    all_orders,
)

from shoal.errors import Closed, TimedOut, UsageError
from shoal.frontend.torch.gpu import device as devices
from shoal.frontend.torch.gpu import local_gpus, pieces
from shoal.frontend.torch.gpu.calls import DeviceCalls
from shoal.frontend.torch.gpu.local_calls import LocalCalls, _Stage, part_of
from shoal.frontend.torch.gpu.local_order import Turn
from shoal.frontend.torch.operations import Operations


class Host(Player):
    """A rank with its device, mates, wire and threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FakeDevice()
        self.rail = FakeWire(self.device)
        self.group = FakeWire()
        self.order = HostOrder()
        self.collectives = FakeCollectives(self.device)
        monkeypatch.setattr(devices, "device_at", lambda place: self.device)
        monkeypatch.setattr(pieces, "PIECE_BYTES", LINE * 4)
        monkeypatch.setattr(local_gpus, "LEAST_BYTES", 1)
        self.operations = Operations(self.group, timedelta(seconds=60))  # type: ignore[arg-type]
        self.local = LocalCalls(
            *(self.group, self.rail, self.order, self.device, self.collectives),  # type: ignore[arg-type]
            self.abort,
        )
        self.line = ByHand()
        self.local._staging = self.line  # type: ignore[assignment]
        self.local._thread = NoThread()  # type: ignore[assignment]
        calls = self.operations._devices = DeviceCalls(self.group, None)  # type: ignore[arg-type]
        calls._has_agreed, calls._local = True, self.local
        self.may_lose = False

    def abort(self, why: str) -> None:
        self.group.abort(why)
        self.rail.lose(Closed(why))

    def lose(self) -> None:
        self.group.lose(LOST)
        self.rail.lose(LOST)

    def has_something_to_do(self) -> bool:
        if self.order.said or self.local._error is not None or self.group.lost is not None:
            return bool(self.local._calls)
        for call in self.local._calls:
            if call.stage is _Stage.WIRE and call.staged is not None:
                if call.staged.done():
                    return True
            elif call.stage in (_Stage.MADE, _Stage.WIRE, _Stage.GATHERING):
                self.device.settle()
                if call.event.passed:
                    return True
        return False

    def actions(self) -> list[Callable[[], object]]:
        may: list[Callable[[], object]] = []
        may += [lambda stream=stream: self.device.step(stream) for stream in self.device.ready()]
        may += [call.finish for call in self.rail.under_way()]
        told = [call for call in self.rail.calls if call.is_done and call.callbacks]
        if told:
            return [told[0].call_back]
        may += [lambda turn=turn: self.order.say(turn) for turn in self.order.may_be_next()]
        if self.line.can_post():
            may.append(self.line.poll)
        if self.has_something_to_do():
            may.append(self.local.step)
        if self.may_lose and self.group.lost is None:
            may.append(self.lose)
        return may


def reduced(host: Host, n: int, first: float, op: Any = dist.ReduceOp.SUM) -> Reduced:
    def expect(given: torch.Tensor) -> torch.Tensor:
        summed = given * 2 + 3  # among the GPUs, and then over the wire
        expected = summed if host.rail.size == 1 else summed * 2 + 3
        expected /= SIZE if op == dist.ReduceOp.AVG else 1
        for begin, end in part_of(n, 0, SIZE):
            expected[begin:end] = ELSEWHERE
        return expected

    return Reduced(host, n, first, op, expect)


def check_nothing_is_left(host: Host) -> None:
    assert not host.line.waiting
    assert not host.rail.under_way()
    assert not host.device.pending()
    assert host.device.n_blocks_held() == 0
    assert host.device.used <= host.device.kept
    assert not host.local._calls


@pytest.mark.parametrize("n", [2 * 3, 2 * LINE + 1, 4 * LINE])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
@pytest.mark.parametrize("n_hosts", [1, 2])
def test_one_is_right_in_every_order(
    n: int, op: Any, n_hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def game(choose: Callable[[int], int]) -> None:
        host = Host(monkeypatch)
        host.rail.size = n_hosts  # type: ignore[misc]
        call = reduced(host, n, 5.0, op)
        host.play(choose, call.look)
        assert call.seen == [call.expected()]
        assert host.order.begun == [Turn(0, 0), Turn(0, 1)]
        assert bool(host.rail.calls) == (n_hosts == 2)
        check_nothing_is_left(host)

    assert all_orders(game) >= 1


def test_only_this_ranks_part_goes_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    call = reduced(host, 200, 1.0)
    host.play(lambda n: 0, call.look)
    assert sum(len(each.read_at_first[0]) for each in host.rail.calls) == 100 * 4
    assert len(host.rail.calls) == 4  # pieces, which overlap
    assert not host.group.calls


def test_a_reduce_scatter_goes_before_an_all_gather_that_waits_for_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    calls = [reduced(host, 6, float(k)) for k in range(2)]

    def until_idle() -> None:
        while host.has_something_to_do() or host.device.ready() or host.line.can_post():
            host.device.run_dry()
            host.line.poll()
            host.local.step()

    until_idle()
    assert host.order.ready_here == [Turn(0, 0), Turn(1, 0)]
    for _ in range(2):
        host.order.say(host.order.may_be_next()[0])
        until_idle()
    assert len(host.rail.under_way()) == 2  # the first is on the wire, and held up nothing
    second = host.rail.calls[1]
    second.finish()
    second.call_back()
    until_idle()
    assert host.order.ready_here == [Turn(1, 1)]  # nor does it hold up the second's way back
    host.order.say(Turn(1, 1))
    until_idle()
    calls[1].look()
    assert calls[1].waited
    assert not calls[0].work.is_completed()
    host.play(lambda n: 0, lambda: [call.look() for call in calls])
    assert [call.seen for call in calls] == [[call.expected()] for call in calls]


def test_a_tensor_on_another_gpu_than_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    monkeypatch.setattr(devices, "device_at", lambda place: FakeDevice(1))
    with pytest.raises(UsageError, match="on cuda:1, but sums of this group run on cuda:0"):
        host.operations.allreduce([on_device(torch.arange(6.0), OnOtherDevice)])
    assert not host.local._calls


# ---- what fails ----


def test_gpus_that_do_not_end_an_all_gather_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    call = reduced(host, 6, 1.0)
    while host.order.begun != [Turn(0, 0), Turn(0, 1)]:
        host.actions()[0]()
    host.local._calls[0].deadline = 0.0
    host.local.step()
    with pytest.raises(TimedOut, match="had not all-gathered the parts of it"):
        call.work.wait()
    assert host.collectives.aborted == 1
    assert len(host.group.aborted) == 1


def test_a_local_collective_that_raises_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    calls = [reduced(host, 6, 1.0), Reduced(host, 6, 2.0)]
    host.collectives.fails = True
    host.play(lambda n: 0, lambda: [call.look() for call in calls])
    for call in calls:
        assert [str(error) for error in call.raised] == ["NCCL has failed"]
    assert host.group.aborted == ["NCCL has failed"]
    check_nothing_is_left(host)


def test_closing_fails_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.line.close = lambda: None  # type: ignore[attr-defined]
    call = reduced(host, 6, 1.0)
    host.operations.shutdown()
    host.local.step()  # the thread, which is there while calls are
    with pytest.raises(Closed, match="the group was closed or aborted"):
        call.work.wait()
    with pytest.raises(Closed):
        host.operations.allreduce([on_device(torch.ones(6))])
    assert host.collectives.aborted == host.collectives.closed == 1
    assert host.order.closed


def test_a_piece_that_came_back_does_not_overtake_who_waited_for_the_call_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    call = reduced(host, 4 * LINE, 1.0)  # a part of two pieces
    while len(host.rail.calls) < 2:
        host.actions()[0]()
    host.rail.calls[0].finish()
    host.rail.calls[0].call_back()
    host.lose()
    host.rail.calls[1].call_back()
    while not call.work.is_completed():
        host.local.step()
    call.look()
    assert call.raised == [LOST]
    assert host.device.current not in host.device.ready()  # it goes on behind the piece
    host.device.run_dry()
    assert not call.tensor.any()
