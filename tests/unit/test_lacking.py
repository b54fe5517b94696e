"""`StepWatch`: how long other ranks may wait for a rank whose step is stuck."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.average import lacking
from shoal.average.lacking import StepWatch
from shoal.errors import Closed

_LONG_S = 60.0


def watched(monkeypatch: pytest.MonkeyPatch, looks: Iterator[bool]) -> Any:
    """Return a group whose other ranks wait or not, by look; it keeps the reason of its end."""
    group = SimpleNamespace(timeout_s=0.0, mesh="links", error=None, why="", n_looks=0)
    group.looked, group.ended = threading.Event(), lambda: group.error
    group.abort = lambda why: setattr(group, "why", why)

    def look(_group: Any, _numbers: object) -> bool:
        group.thread = threading.current_thread()
        group.n_looks += 1
        group.looked.set()
        return next(looks)

    monkeypatch.setattr(lacking, "is_waited_for", look)
    return group


def await_end(group: Any) -> None:
    """Wait for the end of the watching thread."""
    assert group.looked.wait(_LONG_S)
    group.thread.join(_LONG_S)
    assert not group.thread.is_alive()


def test_a_step_ends_when_others_have_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    n = lacking._N_LOOKS
    looks = [False] * 3 * n + [True] * (n - 1) + [False] + [True] * n
    group = watched(monkeypatch, iter(looks))
    watch = StepWatch(group, ())
    watch.start("no bias here")
    await_end(group)
    assert group.n_looks == len(looks)
    assert group.why.startswith("no average: no bias here; the group has ended: call shrink()")


def test_a_step_that_goes_on_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks() -> Iterator[bool]:
        yield from [True] * (lacking._N_LOOKS - 1)
        watch.stop()
        yield True

    group = watched(monkeypatch, looks())
    watch = StepWatch(group, ())
    watch.start("it comes")
    await_end(group)
    assert group.n_looks == lacking._N_LOOKS
    assert not group.why


@pytest.mark.parametrize("what", ["averager", "group", "links"])
def test_a_watch_ends_with_its_subject(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = watched(monkeypatch, itertools.repeat(False))
    held = [StepWatch(group, ())]
    held[0].start("it comes")
    assert group.looked.wait(_LONG_S)
    if what == "averager":
        held.clear()
    elif what == "group":
        group.error = Closed("another rank aborted it")
    else:
        group.mesh = None
    await_end(group)
