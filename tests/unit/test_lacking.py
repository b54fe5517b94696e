"""`StepWatch`: how long other ranks may wait for a rank whose step is stuck."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.average import lacking
from shoal.average.lacking import StepWatch
from shoal.errors import Closed

_LONG_S = 60.0


class Group:
    """A group whose other ranks wait or not, by look; keeps the reason of its end."""

    timeout_s = 0.0
    mesh: object = "links"
    error: Exception | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Iterator[bool]) -> None:
        self.n_looks = 0
        self.why = ""
        self.looked = threading.Event()
        self._looks = looks
        monkeypatch.setattr(lacking, "is_waited_for", self._look)

    def ended(self) -> Exception | None:
        return self.error

    def abort(self, why: str) -> None:
        self.why = why

    def join(self) -> None:
        """Wait for the end of the watching thread."""
        assert self.looked.wait(_LONG_S)
        self._thread.join(_LONG_S)
        assert not self._thread.is_alive()

    def _look(self, _group: Any, _numbers: object) -> bool:
        self._thread = threading.current_thread()
        self.n_looks += 1
        self.looked.set()
        return next(self._looks)


def test_a_step_ends_when_others_have_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    n = lacking._N_LOOKS
    looks = [False] * 3 * n + [True] * (n - 1) + [False] + [True] * n
    group = Group(monkeypatch, iter(looks))
    watch = StepWatch(group, ())  # type: ignore[arg-type]
    watch.start("no bias here")
    group.join()
    assert group.n_looks == len(looks)
    assert group.why.startswith("no average: no bias here; the group has ended: call shrink()")


def test_a_step_that_goes_on_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks() -> Iterator[bool]:
        yield from [True] * (lacking._N_LOOKS - 1)
        watch.stop()
        yield True

    group = Group(monkeypatch, looks())
    watch = StepWatch(group, ())  # type: ignore[arg-type]
    watch.start("it comes")
    group.join()
    assert group.n_looks == lacking._N_LOOKS
    assert not group.why


@pytest.mark.parametrize("what", ["averager", "group", "links"])
def test_a_watch_ends_with_its_subject(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, itertools.repeat(False))
    held = [StepWatch(group, ())]  # type: ignore[arg-type]
    held[0].start("it comes")
    assert group.looked.wait(_LONG_S)
    if what == "averager":
        held.clear()
    elif what == "group":
        group.error = Closed("another rank aborted it")
    else:
        group.mesh = None
    group.join()
