"""The example of an elastic job: workers are killed and come, and the loss is the undisturbed one.

`SHOAL_SOAK=1` makes a minute of it, as `make test-soak` does.
"""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
from process.examples import run_example

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

SECONDS, EVERY = (60, 4) if os.environ.get("SHOAL_SOAK") else (5, 1.5)


def test_a_job_of_which_workers_are_killed_and_to_which_others_come_loses_no_step() -> None:
    options = f"--seconds={SECONDS}", f"--every={EVERY}", "--seed=1"
    run = run_example("elastic.py", *options, timeout_s=SECONDS + 200)
    events = re.search(r"(\d+) workers were killed, and (\d+) came", run.stdout)
    assert events is not None, run.stdout
    assert min(map(int, events.groups())) > 0
    found = re.search(r"loss after (\d+) steps: ([\d.]+), undisturbed: ([\d.]+)", run.stdout)
    assert found is not None, run.stdout
    assert int(found[1]) > 20
    assert float(found[2]) == pytest.approx(float(found[3]), rel=1e-3)
