"""A process that may not start another thread: joining fails clearly and leaks nothing."""

import codecs
import os
import resource
import signal

from process.ranks import on_ranks
from process.stage import Stage, error_of

import shoal
from shoal.errors import ShoalError

NOBODY = 65534


def refuse_threads() -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)  # the limit does not apply to root
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))


@on_ranks(1, has_stage=True)
def test_a_rank_that_cannot_start_a_thread_fails_clearly_and_leaks_nothing() -> None:
    store = Stage.from_environment().store
    # Load everything first: another user may not read the files.
    shoal.init(store, 0, 1).close()
    codecs.lookup("ascii")
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    refuse_threads()
    before = len(os.listdir("/proc/self/fd"))
    errors = [error_of(shoal.init, store, 0, size) for size in (1, 1, 2)]
    assert len(os.listdir("/proc/self/fd")) == before
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    with shoal.init(store, 0, 1) as group:
        group.barrier()
    for error in errors:
        assert type(error) is ShoalError, error
        assert "rank 0 cannot join: could not start " in str(error)
        assert "ulimit -u" in str(error)
