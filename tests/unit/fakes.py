"""A group that only takes notes, and calls that the test ends by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.group.calls import Calls

if TYPE_CHECKING:
    import pytest

    from shoal.errors import ShoalError


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    """Let no thread be started, as a limit of processes does."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)


class FakeWork:
    """A call that the test ends by hand."""

    def __init__(self) -> None:
        self.is_done = False
        self.failure: ShoalError | None = None
        self.waits: list[float | None] = []
        self.callbacks: list[Callable[[Any], None]] = []

    def finish(self, failure: ShoalError | None = None) -> None:
        self.is_done, self.failure = True, failure
        for callback in self.callbacks:
            callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        self.waits.append(timeout_s)
        self.is_done = True  # whoever waits drives it
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        return self.is_done

    def error(self) -> ShoalError | None:
        return self.failure if self.is_done else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


class FakeGroup:
    """Notes every call, with the timeout that it has. Rank 1 of 2."""

    name, rank, size = "fake", 1, 2
    timeout_s = 1.0
    check_fold = Calls.check_fold

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.works: list[FakeWork] = []

    def __getattr__(self, name: str) -> Callable[..., FakeWork | None]:
        def call(*arguments: Any, **options: Any) -> FakeWork | None:
            options = {"timeout_s": self.timeout_s, **options}
            self.calls.append((name, arguments, options))
            if not (options.get("async_op") or options.get("work")):
                return None
            self.works.append(FakeWork())
            return self.works[-1]

        return call
