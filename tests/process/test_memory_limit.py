"""In a container with little memory an excessive request is refused, not OOM-killed."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.ranks import run_ranks
from process.stage import error_of

import shoal
from shoal.errors import ShoalError

LIMIT = 256 << 20


@contextlib.contextmanager
def limited_cgroup() -> Iterator[Path]:
    """Make a cgroup with little memory; skip the test where that is not possible."""
    mounts = Path("/proc/self/mountinfo").read_text()
    v1 = re.search(r"^(?:\S+ ){4}(\S+) .* - cgroup \S+ \S*\bmemory\b", mounts, re.MULTILINE)
    v2 = re.search(r"^(?:\S+ ){4}(\S+) .* - cgroup2 ", mounts, re.MULTILINE)
    found, limit = (v1, "memory.limit_in_bytes") if v1 else (v2, "memory.max")
    if found is None:
        pytest.skip("no cgroup that limits memory is mounted here")
    cgroup = Path(found[1]) / f"shoal-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield cgroup
    finally:
        cgroup.rmdir()


def ask_for_too_much(cgroup: str) -> tuple[Exception | None, float]:
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    error = error_of(shoal.empty, 2 * LIMIT, "uint8")
    enough = shoal.empty(LIMIT // 4, "uint8")
    enough[:] = 1
    return error, float(enough[-1])


def test_a_request_beyond_a_containers_memory_is_refused_with_the_numbers() -> None:
    with limited_cgroup() as cgroup:
        ((error, last),) = run_ranks(ask_for_too_much, 1, str(cgroup))
        assert type(error) is ShoalError
        assert f"reservation of {2 * LIMIT} B" in str(error)
        assert f"the memory limit of {cgroup} (" in str(error)
        assert last == 1
