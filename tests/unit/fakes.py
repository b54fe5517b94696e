"""A group that only records calls, which the test ends by hand."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.group.calls import Calls


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    """Refuse to start threads, as a process limit does."""

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
        self.is_done = True  # a waiting thread drives the call
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        return self.is_done

    def error(self) -> ShoalError | None:
        return self.failure if self.is_done else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


class UnseenWork(FakeWork):
    """A call whose end no thread awaits."""

    def on_done(self, callback: Callable[[Any], None]) -> None:
        raise ShoalError("could not start the thread shoal-completions")


class FakeGroup:
    """A group that records every call, with its timeout. Rank 1."""

    name, rank = "fake", 1
    timeout_s = 1.0
    check_fold = Calls.check_fold

    def __init__(self, size: int = 2) -> None:
        self.size = size
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
