"""The children of a server, as its parent watches over them."""

import errno
import os
import selectors
import subprocess
import sys

import pytest

from shoal.rendezvous.acceptor import run_ready
from shoal.server.views import Views


class Child:
    """A process that says some lines and waits for its input to end."""

    def __init__(self, *lines: str) -> None:
        code = f"import sys\nfor line in {lines}: print(line, flush=True)\nsys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-S", "-c", code], **pipes)
        assert self.process.stdout is not None
        self.pipe = os.dup(self.process.stdout.fileno())
        self.process.stdout.close()
        os.set_blocking(self.pipe, False)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def forget(self) -> None:
        """It was waited for by somebody else."""
        self.process.returncode = 0


def test_what_a_child_told_last_is_known_until_it_ends() -> None:
    with selectors.DefaultSelector() as selector:
        views, one, other = (
            Views(selector),
            Child('{"view": 1}', '{"view": 2}', "half a"),
            Child("no"),
        )
        views.add(one.process.pid, one.pipe, 7, "job")
        views.add(other.process.pid, other.pipe, 8, "other job")
        while views.told_of(7)[0].get("view") != 2:
            run_ready(selector, 10.0)
        assert views.told_of(7) == [{"view": 2, "job": "job", "pid": one.process.pid}]
        assert len(views.told_of(None)) == views.n == 2
        assert views.keys() == {7, 8}
        one.end()
        while views.n == 2:
            run_ready(selector, 10.0)
        assert views.keys() == {8}
        views.kill_all()
        assert views.n == 0
        other.end()
        one.forget()
        other.forget()


def test_the_oldest_view_of_a_job_makes_room_and_no_other_jobs() -> None:
    with selectors.DefaultSelector() as selector:
        views, children = Views(selector), [Child() for _ in range(3)]
        for key, one in zip((7, 8, 7), children, strict=True):
            views.add(one.process.pid, one.pipe, key, "job")
        views.make_room(7, 2)
        assert [view["pid"] for view in views.told_of(None)] == [
            one.process.pid for one in children[1:]
        ]
        views.kill_all()
        for one in children:
            one.end()
            one.forget()


def test_a_child_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with selectors.DefaultSelector() as selector:
        views, one = Views(selector), Child()
        monkeypatch.setattr(os, "pidfd_open", none_left)
        with pytest.raises(OSError, match="Too many"):
            views.add(one.process.pid, one.pipe, 7, "job")
        with pytest.raises(ProcessLookupError):
            os.kill(one.process.pid, 0)
        one.end()
        one.forget()
