"""Counting calls, and the time with any in flight."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.state.tally import Tally


class Call:
    def __init__(self, clock: Any) -> None:
        self._clock, self.finished_ns = clock, 0

    def done(self) -> bool:
        return self.finished_ns > 0

    def end(self) -> None:
        self.finished_ns = self._clock.monotonic_ns()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a clock that the test sets, in seconds."""
    clock = SimpleNamespace(now_s=100, monotonic_ns=lambda: clock.now_s * 1_000_000_000)
    monkeypatch.setattr("shoal.state.tally.time", clock)
    return clock


def test_time_with_several_calls_in_flight_counts_once(clock: Any) -> None:
    tally, first, second = Tally(), Call(clock), Call(clock)
    clock.now_s = 110
    tally.note(first, 1, "all_reduce", 8)
    clock.now_s = 112
    tally.note(second, 1, "all_reduce", 4)
    clock.now_s = 115
    first.end()
    clock.now_s = 117
    second.end()
    clock.now_s = 120
    assert tally.read() == (20.0, 7.0, {(1, "all_reduce"): (2, 12)})


def test_a_running_call_counts_up_to_each_reading(clock: Any) -> None:
    tally, call = Tally(), Call(clock)
    tally.note(call, 1, "barrier", 1)
    clock.now_s = 103
    assert tally.read() == (3.0, 3.0, {})
    clock.now_s = 105
    call.end()
    clock.now_s = 109
    assert tally.read() == (9.0, 5.0, {(1, "barrier"): (1, 1)})
    clock.now_s = 110
    assert tally.read()[1] == 5.0


def test_calls_are_counted_and_freed_without_a_reader(clock: Any) -> None:
    tally, running = Tally(), Call(clock)
    tally.note(running, 2, "broadcast", 1)
    for _ in range(1000):
        call = Call(clock)
        tally.note(call, 1, "all_reduce", 8)
        clock.now_s += 1
        call.end()
        assert len(tally._noted) < 64
    assert tally.read() == (1000.0, 1000.0, {(1, "all_reduce"): (1000, 8000)})
    running.end()
    assert tally.read()[2][2, "broadcast"] == (1, 1)


def test_a_call_whose_callback_makes_another_call_is_counted(clock: Any) -> None:
    tally, later = Tally(), Call(clock)

    class Noticed(Call):
        def done(self) -> bool:
            tally.note(later, 1, "broadcast", 2)
            return True

    tally.note(Noticed(clock), 1, "all_reduce", 8)
    assert tally.read()[2] == {(1, "all_reduce"): (1, 8)}
    later.end()
    assert tally.read()[2] == {(1, "all_reduce"): (1, 8), (1, "broadcast"): (1, 2)}
