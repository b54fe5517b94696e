"""A process that may not start another thread: joining fails clearly and leaks nothing."""

import codecs
import os
import resource
import signal
from typing import Any

from process.ranks import run_ranks
from process.stage import Stage, error_of

import shoal
from shoal.errors import ShoalError

NOBODY = 65534


def refuse_threads() -> None:
    """Keep this process from starting threads."""
    if os.getuid() == 0:
        os.setuid(NOBODY)  # the limit does not apply to root
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))


def join_without_threads() -> dict[str, Any]:
    """Join with the process limit reached, and again without it."""
    store = Stage.from_environment().store
    # Load everything first: another user may not read the files.
    shoal.init(store, 0, 1).close()
    codecs.lookup("ascii")
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    refuse_threads()
    before = len(os.listdir("/proc/self/fd"))
    errors = [error_of(shoal.init, store, 0, size) for size in (1, 1, 2)]
    kept = len(os.listdir("/proc/self/fd")) - before
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with shoal.init(store, 0, 1) as group:
        group.barrier()
    return {"errors": errors, "kept": kept, "blocked": blocked}


def test_a_rank_that_cannot_start_a_thread_fails_clearly_and_leaks_nothing() -> None:
    with Stage() as stage:
        (result,) = run_ranks(join_without_threads, 1, env=stage.env)
    assert result["blocked"] == set()
    assert result["kept"] == 0
    for error in result["errors"]:
        assert type(error) is ShoalError, error
        assert "rank 0 cannot join: could not start " in str(error)
        assert "ulimit -u" in str(error)
