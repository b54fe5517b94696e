"""Memory of calls in flight, beside the user's buffers."""

import resource

import numpy as np
from process.ranks import run_ranks
from process.stage import pretend_hosts

import shoal

N_CALLS = 60
N_ELEMS = 1 << 20  # 4 MiB of float32, and as much scratch
CEILING_MIB = 50  # SHOAL_STAGING_BYTES


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reduce_many_at_once(ranks_per_host: int) -> float:
    """Return the growth of the process while all-reduces that need scratch are in flight."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        data = [np.full(N_ELEMS, at + group.rank, np.float32) for at in range(N_CALLS)]
        group.all_reduce(np.zeros(N_ELEMS, np.float32))
        before = peak_mib()
        works = [group.all_reduce(each, async_op=True) for each in data]
        for at, (work, each) in enumerate(zip(works, data, strict=True)):
            assert work is not None
            work.wait()
            assert (each == 2 * at + 1).all()
        return peak_mib() - before


def test_scratch_of_many_calls_stays_under_the_ceiling_of_staging() -> None:
    for ranks_per_host in (2, 1):
        grown = run_ranks(
            reduce_many_at_once, 2, ranks_per_host, env={"SHOAL_ALGO": "all_reduce:direct"}
        )
        # Besides the ceiling there are slots, one call's scratch, and memory the allocator keeps:
        # 48 to 88 MiB in all, where the scratch of all calls alone would be 240.
        assert max(grown) < 2.5 * CEILING_MIB, grown
