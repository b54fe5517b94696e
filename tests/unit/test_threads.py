"""Threads of shoal's Python: their only starter, thread limits, and jobs on several threads."""

import re
import sys
import threading
from pathlib import Path

import pytest
from unit.fakes import refuse_threads

import shoal
from shoal import threads
from shoal.errors import Closed, ShoalError
from shoal.threads import Threads, start

ROOT = Path(shoal.__file__).parent


def test_no_other_file_starts_threads() -> None:
    starts = re.compile(r"\bThread\(|\bThreadPoolExecutor\(|\bTimer\(|start_new_thread")
    files = [path for path in ROOT.rglob("*.py") if starts.search(path.read_text())]
    assert files == [ROOT / "threads.py"]


def test_an_error_about_too_many_threads_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    monkeypatch.setattr(threads.resource, "getrlimit", lambda _: (512, 1024))
    words = r"the thread shoal-x: can't start new thread; .*ulimit -u, now 512\).*pids limit"
    with pytest.raises(ShoalError, match=words):
        start("shoal-x", print)


def test_jobs_of_one_thread_run_in_order() -> None:
    jobs, ran = Threads("shoal-x"), list[int]()
    gate = threading.Event()
    jobs.submit(gate.wait)
    for number in range(8):
        jobs.submit(lambda number=number: ran.append(number))  # type: ignore[misc]
    gate.set()
    jobs.finish()
    assert ran == list(range(8))


def test_later_jobs_run_on_other_threads_while_a_job_waits_for_them() -> None:
    jobs, all_run = Threads("shoal-x", most=8), threading.Barrier(8)
    for _ in range(8):
        jobs.submit(all_run.wait)
    jobs.finish()
    assert all_run.n_waiting == 0
    assert not all_run.broken


def test_a_job_that_raises_is_logged_and_the_next_runs(caplog: pytest.LogCaptureFixture) -> None:
    jobs, ran = Threads("shoal-x"), list[int]()
    for ending in (sys.exit, lambda: 1 / 0):
        jobs.submit(ending)
        jobs.submit(lambda: ran.append(1))
    jobs.finish()
    assert ran == [1, 1]
    assert caplog.text.count("a job of the thread shoal-x failed") == 2


def test_a_job_that_was_refused_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, ran = Threads("shoal-x"), list[str]()
    with monkeypatch.context() as limited:
        refuse_threads(limited)
        with pytest.raises(ShoalError, match="could not start the thread shoal-x"):
            jobs.submit(lambda: ran.append("refused"))
    jobs.submit(lambda: ran.append("accepted"))
    jobs.finish()
    assert ran == ["accepted"]
    with pytest.raises(Closed, match="shoal-x"):
        jobs.submit(print)
