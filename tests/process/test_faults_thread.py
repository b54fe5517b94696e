"""A process that may not start one more thread: joining fails in words and leaves nothing."""

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
    """Let this process start no more threads."""
    if os.getuid() == 0:
        os.setuid(NOBODY)  # root may start as many as it likes
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))


def join_without_threads() -> dict[str, Any]:
    """Join where the limit of processes is reached, and again where it is not."""
    store = Stage.from_environment().store
    # Load everything: another user may not read it.
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


def test_a_rank_that_may_start_no_thread_says_so_and_keeps_no_signal_and_no_descriptor() -> None:
    with Stage() as stage:
        (result,) = run_ranks(join_without_threads, 1, env=stage.env)
    assert result["blocked"] == set()
    assert result["kept"] == 0
    for error in result["errors"]:
        assert type(error) is ShoalError, error
        assert "rank 0 cannot join: could not start " in str(error)
        assert "ulimit -u" in str(error)
