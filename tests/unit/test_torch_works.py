"""torch's Works and their futures over calls that the test ends: no native code."""

import os
import threading
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch
import torch._C._distributed_c10d as c10d
from process.stage import error_of
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from unit.fakes import FakeWork, UnseenWork, refuse_threads
from unit.in_process import in_threads

from shoal.errors import PeerLost, TimedOut
from shoal.frontend.torch import work as module
from shoal.frontend.torch.work import InBackground, PendingWork, calls_of_hook
from shoal.threads import Threads

LOST = PeerLost(3, "spruce", doing="recv 8 B")


def test_the_result_is_copied_back_once_for_any_number_of_waiting_threads() -> None:
    copies: list[int] = []
    started = FakeWork()
    work = PendingWork([started], [], lambda: copies.append(1))  # type: ignore[list-item]
    future = work.get_future()
    in_threads(*[work.wait] * 8)
    started.finish()
    future.wait()
    assert copies == [1]


def test_the_future_is_done_when_the_last_of_several_calls_is() -> None:
    started = [FakeWork(), FakeWork()]
    tensors = [torch.ones(1), torch.ones(2)]
    seen: list[str] = []
    work = PendingWork(started, tensors, lambda: seen.append("copied back"))  # type: ignore[arg-type]
    future = work.get_future()
    started[1].finish()
    assert not future.done()
    started[0].finish()
    assert future.wait()[1] is tensors[1]
    assert seen[0] == "copied back"


def test_after_wait_the_future_is_done_and_its_callbacks_have_run() -> None:
    started = FakeWork()  # reports its end to no one else
    work = PendingWork([started], [torch.ones(1)])  # type: ignore[list-item]
    ran: list[str] = []
    future = work.get_future()
    future.add_done_callback(lambda _: ran.append("callback"))
    chained = future.then(lambda done: done.value()[0] + 1)
    assert not future.done()
    work.wait()
    assert future.done()
    assert ran == ["callback"]
    assert chained.done()
    assert chained.value().item() == 2
    started.finish()
    assert ran == ["callback"]


def test_the_future_of_a_failed_call_is_done_after_wait_raises() -> None:
    for take_it_after in (False, True):
        started = FakeWork()
        started.failure = LOST
        work = PendingWork([started], [torch.ones(1)])  # type: ignore[list-item]
        before = None if take_it_after else work.get_future()
        with pytest.raises(PeerLost):
            work.wait()
        future = before or work.get_future()
        assert future.done()
        with pytest.raises(RuntimeError, match="PeerLost: rank 3 on spruce is gone"):
            future.value()


def test_a_wait_does_not_wait_for_another_work_on_the_same_storage() -> None:
    tensor = torch.ones(4)
    call: Any = FakeWork
    works = [PendingWork([call()], [part]) for part in tensor.split(2)]
    with allow_inflight_collective_as_graph_input_ctx():
        for work in works:
            module.register(work, lists=True)
        waiting = threading.Thread(target=works[0].wait, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        assert not works[1].get_future().done()
        works[1].wait()
        assert c10d._get_work_registry_size() == 0


def test_works_that_are_waited_for_by_their_tensors_alone_are_not_kept() -> None:
    with allow_inflight_collective_as_graph_input_ctx():
        for _ in range(3):
            call, tensor = FakeWork(), torch.ones(4)
            work = PendingWork([call], [tensor])  # type: ignore[list-item]
            module.register(work, lists=True)
            call.finish()
            work.get_future().wait()
            torch.ops._c10d_functional.wait_tensor(tensor)
        assert list(module._listed) == [work]
        work.wait()
    assert not module._listed


def test_a_wait_that_times_out_completes_no_future() -> None:
    class Slow(FakeWork):
        def wait(self, timeout_s: float | None = None) -> None:
            if not self.is_done:
                raise TimedOut("too short")

    started = Slow()
    work = PendingWork([started], [])  # type: ignore[list-item]
    future = work.get_future()
    with pytest.raises(TimedOut):
        work.wait(timedelta(seconds=1))
    assert not future.done()
    started.finish()
    assert future.wait() == []


def test_no_wait_returns_while_another_thread_runs_the_callbacks() -> None:
    work = PendingWork([FakeWork()], [])  # type: ignore[list-item]
    seen: list[str] = []
    both_wait = threading.Barrier(2)

    def wait() -> None:
        both_wait.wait()
        work.wait()
        seen.append("wait")

    work.get_future().add_done_callback(lambda _: seen.append("callback"))
    in_threads(wait, wait)
    assert seen == ["callback", "wait", "wait"]


def test_a_timeout_also_limits_the_wait_for_callbacks_on_another_thread() -> None:
    started = FakeWork()
    work = PendingWork([started], [])  # type: ignore[list-item]
    is_called, may_return = threading.Event(), threading.Event()
    work.get_future().add_done_callback(lambda _: [is_called.set(), may_return.wait(20)])
    started.finish()
    is_called.wait()
    with pytest.raises(TimedOut, match=r"waited 0.01 s for the callbacks of a call that has ended"):
        work.wait(timedelta(seconds=0.01))
    started.failure = LOST
    with pytest.raises(PeerLost):
        work.wait(timedelta(seconds=0.01))
    started.failure = None
    may_return.set()
    assert work.wait()


def test_a_timeout_limits_the_wait_for_all_calls_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 12.5, 14.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    started = [FakeWork() for _ in range(3)]
    PendingWork(started, []).wait(timedelta(seconds=3))  # type: ignore[arg-type]
    assert [each.waits for each in started] == [[3.0], [0.5], [0.0]]


def test_a_forked_child_gets_an_error_for_a_call_on_a_thread_of_its_parent() -> None:
    may_end = threading.Event()
    work = PendingWork([InBackground(may_end.wait)], [])  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        refusal = "a forked child has no part"
        is_refused = refusal in str(error_of(work.wait, timedelta(seconds=5)))
        is_refused = is_refused and refusal in str(error_of(work.get_future().wait))
        os._exit(7 if is_refused and work.is_completed() else 1)
    may_end.set()
    assert work.wait()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_callback_may_wait_for_a_future_that_another_thread_completes() -> None:
    first, second = FakeWork(), FakeWork()
    other = PendingWork([second], [torch.ones(1)]).get_future()  # type: ignore[list-item]
    work = PendingWork([first], [])  # type: ignore[list-item]
    called = threading.Event()

    def call(_: object) -> float:
        called.set()
        return float(other.wait()[0].item())

    chained = work.get_future().then(call)
    in_threads(work.wait, lambda: (called.wait(), second.finish()))
    assert chained.value() == 1.0


def test_a_callback_may_wait_for_its_own_work() -> None:
    work = PendingWork([FakeWork()], [torch.ones(1)])  # type: ignore[list-item]
    chained = work.get_future().then(lambda _: [work.wait(), work.result()[0].item()])
    work.wait()
    assert chained.value() == [True, 1.0]


def test_callbacks_on_two_threads_may_wait_for_each_others_works() -> None:
    works = [PendingWork([FakeWork()], []) for _ in range(2)]  # type: ignore[list-item]
    both_run = threading.Barrier(2)
    done: list[bool] = []

    def cross(other: int) -> None:
        both_run.wait()
        works[other].wait()
        done.append(works[other].get_future().done())

    for number, work in enumerate(works):
        work.get_future().add_done_callback(lambda _, other=1 - number: cross(other))
    in_threads(works[0].wait, works[1].wait)
    assert done == [True, True]


def test_a_failed_call_raises_its_own_error_and_the_future_quotes_it() -> None:
    started = FakeWork()
    work = PendingWork([started], [torch.ones(1)])  # type: ignore[list-item]
    future = work.get_future()
    started.finish(LOST)
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is LOST
    for wait in (work.wait, work.result):
        with pytest.raises(PeerLost) as caught:
            wait()
        assert caught.value is LOST
    for wait in (future.wait, future.value, future.then(lambda done: done.value()[0]).wait):
        with pytest.raises(RuntimeError, match="PeerLost: rank 3 on spruce is gone"):
            wait()


def test_a_copy_back_that_fails_reaches_the_future() -> None:
    started, fail = FakeWork(), Mock(side_effect=MemoryError("none left"))
    future = PendingWork([started], [], fail).get_future()  # type: ignore[list-item]
    started.finish()
    with pytest.raises(RuntimeError, match="MemoryError: none left"):
        future.wait()


def test_the_timeout_of_a_wait_applies_only_to_it() -> None:
    started = FakeWork()
    work = PendingWork([started], [])  # type: ignore[list-item]
    work.wait()
    work.wait(timedelta(0))
    work.wait(timedelta(seconds=3))
    assert started.waits == [None, None, pytest.approx(3.0, abs=1)]
    started.failure = TimedOut("too short")
    with pytest.raises(TimedOut, match="too short"):
        work.wait(timedelta(seconds=1))


START: Final = threading.Thread.start


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no thread to start and none idle, as at the program's end."""
    threads = Threads("shoal-futures")
    monkeypatch.setattr(module, "_threads_of", lambda _process_id: threads)
    refuse_threads(monkeypatch)


@pytest.mark.usefixtures("without_threads")
def test_a_future_without_a_thread_has_the_error_and_its_work_the_result() -> None:
    started = FakeWork()
    work = PendingWork([started], [torch.ones(1)])  # type: ignore[list-item]
    future = work.get_future()
    started.finish()
    with pytest.raises(RuntimeError, match="could not start the thread shoal-futures"):
        future.wait()
    assert work.wait()
    assert work.is_success()


@pytest.mark.usefixtures("without_threads")
def test_a_callback_without_a_thread_may_wait_for_older_and_newer_futures() -> None:
    works = [PendingWork([FakeWork()], [torch.ones(1)]) for _ in range(3)]  # type: ignore[list-item]
    older, last = works[0].get_future(), works[1].get_future()
    failed: list[str] = []

    def wait_for_others(_last: object) -> None:
        for future in (older, works[2].get_future()):
            with pytest.raises(RuntimeError) as caught:
                future.wait()
            failed.append(str(caught.value))

    last.then(wait_for_others)
    for work in (1, 0):
        waiting = threading.Thread(target=works[work].works[0].finish, daemon=True)  # type: ignore[union-attr]
        START(waiting)
        waiting.join(20)
        assert not waiting.is_alive()
    assert len(failed) == 2
    assert all("could not start the thread shoal-futures" in each for each in failed)


def test_a_call_ending_with_the_program_ends_its_future(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads("shoal-futures")
    monkeypatch.setattr(module, "_threads_of", lambda _process_id: threads)
    started = FakeWork()
    future = PendingWork([started], [torch.ones(1)]).get_future()  # type: ignore[list-item]
    threads.finish()
    started.finish()
    assert future.done()


def test_a_future_whose_calls_no_thread_awaits_has_the_error_for_every_reader() -> None:
    work = PendingWork([FakeWork(), UnseenWork()], [torch.ones(1)])  # type: ignore[list-item]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not start the thread shoal-completions"):
            work.get_future().wait()
    assert work.wait()


def test_a_hook_may_wait_late_for_many_futures_whose_callbacks_wait_too() -> None:
    """As torch's hook_with_zero_step does around the hook of PowerSGD."""
    works: list[PendingWork] = []

    def future() -> torch.futures.Future[list[torch.Tensor]]:
        return PendingWork([FakeWork()], [torch.ones(1)]).get_future()

    with calls_of_hook(0, works):
        futures = [future().then(lambda _: future().wait()[0] + 1) for _ in range(300)]
        assert futures[0].wait() == 2
    assert all(one.done() and one.value() == 2 for one in futures)


@pytest.mark.parametrize("failure", [None, LOST])
def test_a_hook_that_waits_for_its_future_gets_the_result_or_the_calls_own_error(
    failure: PeerLost | None,
) -> None:
    call, tensor, works = FakeWork(), torch.ones(1), []
    call.failure = failure
    with calls_of_hook(0, works):
        future = PendingWork([call], [tensor]).get_future().then(lambda done: done.value()[0] + 1)
        assert not future.done()
        if failure is None:
            assert future.wait() == 2
        else:
            with pytest.raises(PeerLost, match="spruce"):
                future.wait()
