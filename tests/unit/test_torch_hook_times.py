"""When buckets that a hook averages were in: on a fake device, whose copies end when told so."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from unit.fake_device import FakeDevice, FakeWire, on_device

from shoal.frontend.torch import device as devices
from shoal.frontend.torch.ddp.hook_times import HookTimes
from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.work import holding_futures

GROUP: Any = SimpleNamespace(name="fake", rank=0, size=1, members=(0,), timeout_s=60.0)


class Stepping:
    """Steps of one bucket on a device, which a hook averages over a fake wire."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.wire = FakeWire(self.device)
        self.operations = Operations(self.wire, timedelta(seconds=60))  # type: ignore[arg-type]
        self.gradient = on_device(torch.ones(8))
        self.times = HookTimes(GROUP, ["w"], [self.gradient], [[0]], list)

    def begin(self) -> None:
        self.times.begin()
        self.times.came()
        self.times.full(0)
        self.times.call(0)

    def all_reduce(self) -> tuple[Any, Any]:
        """The works that torch's own hook makes, and the future that it returns."""
        with holding_futures() as works:
            work: Any = self.operations.allreduce([self.gradient])
            future = work.get_future().then(lambda done: done.value()[0])
        self.times.called(0, future)
        return works, future

    def end_calls(self) -> None:
        self.device.run_dry()
        self.operations._flush()
        for call in self.wire.under_way():
            call.finish()
            call.call_back()

    def wait(self, works: Any, future: Any, since: int) -> Any:
        for work in works:
            work.wait()
        future.wait()
        self.times.waited(0, since, works)
        self.times.end(since)
        return self.times.times[-1]


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepping]:
    made = Stepping()
    monkeypatch.setattr(devices, "device_at", lambda place: made.device)
    yield made
    made.device.run_dry()
    made.operations.shutdown()


def test_what_ended_while_the_device_computed_was_in_before_it_was_waited_for(
    stepping: Stepping,
) -> None:
    stepping.begin()
    works, future = stepping.all_reduce()
    stepping.end_calls()
    assert not future.done()  # it is held back until the pass is over
    since = time.monotonic_ns()
    step = stepping.wait(works, future, since)
    assert step.posted[0] < step.done[0] <= since
    assert step.waits[0][0] == since


def test_what_ends_while_it_is_waited_for_is_in_when_its_future_is_done(
    stepping: Stepping,
) -> None:
    stepping.begin()
    works, future = stepping.all_reduce()
    since = time.monotonic_ns()
    stepping.end_calls()
    step = stepping.wait(works, future, since)
    assert since < step.done[0] <= step.waits[0][1] <= step.end


def test_when_a_device_had_computed_a_bucket_is_not_known_and_the_report_says_so(
    stepping: Stepping,
) -> None:
    stepping.begin()
    works, future = stepping.all_reduce()
    stepping.end_calls()
    stepping.wait(works, future, time.monotonic_ns())
    report = stepping.times.report(alone=True)
    (buffer,) = report.buffers
    assert math.isnan(buffer.full)
    assert buffer.posted < buffer.done
    *_, row = str(report).splitlines()
    assert row.count("not known") == 1
    assert "Gradients are on cuda:0: passes and waits are the host's" in str(report)
    assert json.loads(report.to_json())["buffers"][0]["full"] is None


def test_a_future_that_is_done_before_its_device_is_leaves_open_what_was_hidden(
    stepping: Stepping,
) -> None:
    future: Any = torch.futures.Future()
    future.set_result([stepping.gradient])  # as NCCL's, whose kernel has only been given
    for _ in range(2):
        stepping.begin()
        stepping.times.called(0, future)
        step = stepping.wait([], future, time.monotonic_ns())
    assert step.done == (0,)
    report = stepping.times.report(alone=True)
    assert math.isnan(report.steps[0].hidden)
    assert "How much of the communication was hidden is not known." in str(report)
    *_, row = str(report).splitlines()
    assert row.count("not known") == 3  # full, done, took
    assert json.loads(report.to_json())["hidden_share"] is None


def test_a_hook_that_waits_itself_exposes_what_it_takes() -> None:
    times = HookTimes(GROUP, ["w"], [torch.ones(8)], [[0]], list)
    future: Any = torch.futures.Future()
    future.set_result(None)
    times.begin()
    times.call(0)
    times.called(0, future)
    times.waited(0, time.monotonic_ns(), [])
    times.end(time.monotonic_ns())
    (step,) = times.times
    assert step.waits == ((step.posted[0], step.done[0]),)
    assert times.report(alone=True).steps[0].hidden == 0
