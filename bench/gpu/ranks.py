"""Run a function in several processes that share the GPU, and collect the results.

As a script, this file is one of these processes: `ranks.py MODULE FUNCTION ARGUMENTS RESULT`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.rendezvous.listener import hold_port


def run(module: str, function: str, size: int, deadline_s: float, **arguments: Any) -> list[Any]:
    """Run a function on each rank, and return the results.

    The result of a rank that raises or exceeds the deadline is {"error": text}.

    Args:
        module: a module beside this file; its function takes `arguments` and returns JSON values.
    """
    with hold_port() as held, tempfile.TemporaryDirectory() as folder:
        port = held.getsockname()[1]
        files = [Path(folder) / str(rank) for rank in range(size)]
        processes = []
        for rank, file in enumerate(files):
            env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env |= {"OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore"}
            command = [sys.executable, __file__, module, function, json.dumps(arguments), str(file)]
            given = {**os.environ, **{name: str(value) for name, value in env.items()}}
            processes.append(subprocess.Popen(command, env=given))
        until = time.monotonic() + deadline_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
        for process in processes:
            process.kill()
            process.wait()
        return [_result(file, process) for file, process in zip(files, processes, strict=True)]


def _result(file: Path, process: subprocess.Popen[bytes]) -> Any:
    if file.exists():
        return json.loads(file.read_text())
    return {"error": f"the process ended with status {process.returncode} and without a result"}


def failure_of(check: Callable[[Any], None], it: Any) -> str:
    """Run a check on this rank; return its traceback, or "" if it passes."""
    try:
        check(it)
    except Exception:  # noqa: BLE001 - the other checks go on
        return failure()
    return ""


def failure() -> str:
    """Return the traceback of the handled exception, with paths from the project's folder."""
    return traceback.format_exc().replace(f"{Path(__file__).parents[2]}/", "")


def main() -> None:
    """Run the function of one rank, and write its result."""
    module, function, arguments, file = sys.argv[1:]
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except BaseException:  # noqa: BLE001 - the report shows any error
        result = {"error": failure()}
    whole = Path(file).with_suffix(".part")
    whole.write_text(json.dumps(result))
    whole.rename(file)


if __name__ == "__main__":
    main()
