"""Ranks as threads of one process: dropping the last reference to a group leaves it."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import error_of

import shoal
from shoal.errors import PeerLost
from shoal.group.form import form
from shoal.rendezvous.store import MemoryStore

SIZE = 3
# Longer than the ranks may run, so no returned error comes from a deadline.
TIMEOUT_S = 600.0


def ones() -> Any:
    return np.ones(3, np.float32)


def call_and_wait(group: shoal.Group, how: str) -> None:
    work = group.all_reduce(ones(), async_op=how != "wait", work=True)
    assert work is not None
    if how != "callback":
        work.wait()
        return
    ended = threading.Event()
    work.on_done(lambda _: ended.set())
    assert ended.wait(TIMEOUT_S)


@pytest.mark.parametrize("how", ["wait", "wait in the background", "callback"])
@on_ranks(1, deadline_s=30)
def test_a_rank_that_drops_its_group_has_left_it(how: str) -> None:
    gc.disable()  # so that garbage stays uncollected
    store = MemoryStore()
    with ThreadPoolExecutor(SIZE) as threads:

        def join(rank: int) -> shoal.Group:
            return form(store, rank, SIZE, timeout_s=TIMEOUT_S)

        groups = list(threads.map(join, range(SIZE)))
        list(threads.map(call_and_wait, groups, [how] * SIZE))
        del groups[-1]
        for error in threads.map(lambda group: error_of(group.all_reduce, ones()), groups):
            assert isinstance(error, PeerLost)
            assert error.rank == 2
