"""A Chromium without a window, driven over a pipe by the DevTools protocol."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 60
"""For each answer of the browser."""


class Browser:
    """One browser with one page."""

    def __init__(self, chromium: str, profile: Path) -> None:
        # The browser reads commands from descriptor 3 and answers on 4. Ours are above those, so
        # that neither is overwritten before it is in its place.
        (its_in, ours_out), (ours_in, its_out) = (map(_high, os.pipe()) for _ in range(2))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        run = f'exec "$@" 3<&{its_in} 4>&{its_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", run, "-", chromium, *flags, f"--user-data-dir={profile}"],
            pass_fds=(its_in, its_out),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        self._in, self._out = ours_in, ours_out
        self._unread = b""
        self._n_sent = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str) -> None:
        """Load a page, and wait until its scripts have run."""
        # A new fragment alone would not load it again.
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self.run("new Promise((go) => document.readyState === 'complete' ? go() : onload = go)")

    def run(self, script: str) -> Any:
        """The value of a script. A promise is waited for."""
        how = {"awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", expression=script, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, as a user would."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._n_sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._unread:
            left_s = max(0, deadline_s - time.monotonic())
            readable, _, _ = select.select([self._in], [], [], left_s)
            if not readable:
                raise TimeoutError(f"no answer from the browser in {DEADLINE_S} s")
            more = os.read(self._in, 1 << 16)
            if not more:
                raise EOFError(f"the browser ended with code {self._process.wait()}")
            self._unread += more
        one, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


def _high(descriptor: int) -> int:
    """The same open file, under a number that nobody else means."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high
