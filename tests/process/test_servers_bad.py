"""Wrong announcements of workers cause a clear error where somebody can act."""

from pathlib import Path
from typing import Any

from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_that,
    job_env,
    new_key,
    served_group,
    status_of,
    sums,
)
from process.stage import Lines

from shoal.group.pool import view as pool_view
from shoal.shapes import Shape


def announce_an_impossible_plan() -> list[Any]:
    """Rank 0 announces an impossible plan, and then a valid one."""
    lines, right_pack = Lines(), pool_view.pack

    def pack(shape: Shape) -> bytes:
        return right_pack(shape._replace(algorithm="no such algorithm"))

    pool_view.pack = pack
    right = []
    with served_group() as group:
        group.barrier()  # the first call ends the view, which every rank must have seen
        for number in range(2):
            pool: Any = group.pool  # type: ignore[attr-defined]
            view = pool.view
            right.append(sums(group, number, 1_000_003))
            if number == 0:
                pool_view.pack = right_pack
                await_that(lambda: pool.view not in (None, view), "the next view")  # noqa: B023
        shared = pool.view.n_shared
    return [right, shared > 0, lines.texts]


def test_a_server_reports_an_impossible_plan_to_the_workers(
    tmp_path: Path,
) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    with ServerProcess(*keys) as server:
        found = run_ranks(
            announce_an_impossible_plan, N_WORKERS, env=job_env(keys[0], server.address)
        )
        assert status_of(keys[1], server.address)["n_jobs"] <= 1  # it lives
        assert any("cannot serve a call that worker 0 announced" in line for line in server.log)
    for right, is_shared, _ in found:
        assert right == [True, True]
        assert is_shared
    texts = [line for line in found[0][2] if line.startswith("view 1 of the servers has ended: ")]
    assert len(texts) == 1
    assert "server 3 cannot serve a call that worker 0 announced: " in texts[0]
    assert "no such algorithm" in texts[0]
