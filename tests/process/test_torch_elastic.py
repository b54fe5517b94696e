"""The elastic example: workers are killed and join, and the loss is that of an undisturbed job.

`SHOAL_SOAK=1` runs it for a minute, as `make test-soak` does.
"""

import os
import re

import pytest
from process.examples import run_example

SECONDS, EVERY = (60, 4) if os.environ.get("SHOAL_SOAK") else (2, 1)


def test_a_job_whose_workers_are_killed_and_join_loses_no_step() -> None:
    options = f"--seconds={SECONDS}", f"--every={EVERY}", "--seed=1"
    printed = run_example("elastic.py", *options)
    events = re.search(r"(\d+) workers were killed, and (\d+) joined", printed)
    assert events is not None, printed
    assert min(map(int, events.groups())) > 0
    assert "was killed by SIGKILL" in printed
    found = re.search(r"loss after (\d+) steps: ([\d.]+), undisturbed: ([\d.]+)", printed)
    assert found is not None, printed
    assert int(found[1]) > 1
    assert float(found[2]) == pytest.approx(float(found[3]), rel=1e-3)
