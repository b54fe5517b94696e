"""Programs of examples/ and docs/; those of examples/ are forks of a process with torch imported.

`run_example` runs the program itself in the test's process, and `Script` what it starts.
"""

import contextlib
import io
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from process.ranks import Outcome, start_process, start_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 200.0
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Script:
    """A program of examples/ in a forked process, with the interface of a Popen."""

    def __init__(self, number: int, command: Sequence[Any], env: Mapping[str, str]) -> None:
        _python, path, *options = map(str, command)
        needs = "torch" if "\nimport torch" in Path(path).read_text() else "numpy"
        self._ranks = start_process(run_script, path, options, needs=needs, number=number, env=env)
        self._outcome: Outcome | None = None
        self.pid = self._ranks.pid(0)

    def poll(self) -> int | None:
        return self.wait() if self._ranks.has_ended(0) else None

    def wait(self) -> int:
        outcome = self.outcome
        return -1 if outcome.died else int(outcome.error is not None)

    def kill(self) -> None:
        self._ranks.end()

    @property
    def outcome(self) -> Outcome:
        """Wait until the example ends; return its status and output."""
        if self._outcome is None:
            (self._outcome,) = self._ranks.wait(DEADLINE_S)
        return self._outcome


def run_script(path: str, options: list[str]) -> None:
    """Run the program, in a forked process or in the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *options])
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


@contextlib.contextmanager
def forked_scripts() -> Iterator[list[Script]]:
    """Make `subprocess.Popen` fork programs of examples/; yield the started ones."""
    started: list[Script] = []
    popen = subprocess.Popen

    def start(command: Sequence[Any], **how: Any) -> Any:
        if Path(*command[1:2]).parent != EXAMPLES:
            return popen(command, **how)
        started.append(Script(len(started), command, how["env"]))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        try:
            yield started
        finally:
            for script in started:
                script.kill()


def run_example(name: str, *options: str) -> str:
    """Run an example that must succeed; return the output of its processes."""
    printed, failed = io.StringIO(), ""
    with (
        pytest.MonkeyPatch.context() as patch,
        forked_scripts() as started,
        warnings.catch_warnings(),
    ):
        for variable in LAUNCHERS:
            patch.delenv(variable, raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore", ResourceWarning)  # of long-lived objects
            try:
                run_script(str(EXAMPLES / name), list(options))
            except SystemExit as end:
                failed = f"{name} ended with {end}"
        ended = [str(script.outcome) for script in started]
    assert not failed, "\n".join([failed, printed.getvalue(), *ended])
    return "\n".join([printed.getvalue(), *ended])


def run_ranks_of(name: str, size: int, *options: str) -> list[str]:
    """Run an example's ranks, as torchrun starts them; return the output of each."""
    with start_ranks(run_script, size, str(EXAMPLES / name), [*options], needs="torch") as ranks:
        return ranks.outputs(DEADLINE_S)


def names_of_page(name: str, number: int = 0) -> dict[str, Any]:
    """On a rank: run a block of Python of a page of docs/, and return its variables."""
    page = (EXAMPLES.parent / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(blocks[number], names)
    return names


def equal_digits(name: str) -> float:
    """Return the number of digits to which an example finds ranks and one process equal."""
    [digits] = re.findall(r"equal in (\S+) digits", run_example(name))
    return float(digits)
