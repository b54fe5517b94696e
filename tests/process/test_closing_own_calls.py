"""Closing waits for calls that shoal made itself and no caller waits for."""

from process.ranks import on_ranks
from process.stage import Stage

import shoal

N_RANKS = 3


@on_ranks(N_RANKS, has_stage=True)
def test_a_rank_that_closes_first_still_takes_part_in_unwaited_calls() -> None:
    stage, group = Stage.from_environment(), shoal.init()
    data = bytearray(b"order 01" if group.rank == 0 else bytes(8))
    if group.rank == 0:
        stage.await_all(N_RANKS - 1, "closes")
    work = group.broadcast(data, 0, async_op=True)
    assert work is not None
    work.finish_at_close()
    if group.rank > 0:
        stage.cue(f"rank {group.rank - 1}: closes")
    group.close()
    work.wait()
    assert data == b"order 01"
