"""The programs in examples/, run as their users run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(
    name: str, *options: str, timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run an example that must end well; return what it printed."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    assert run.returncode == 0, run.stderr
    return run


def equal_digits(name: str) -> float:
    """In how many digits an example that compares ranks with one process finds both equal."""
    [digits] = re.findall(r"equal in (\S+) digits", run_example(name).stdout)
    return float(digits)
