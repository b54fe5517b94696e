"""Servers whose hosts report no rate are measured when a view forms, for all workers."""

import logging
from pathlib import Path
from typing import Any

import pytest
from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    is_right,
    job_env,
    new_key,
    noise,
    served_group,
)
from process.stage import Lines

from shoal.group.pool import forming, probe


def call_with_servers(how: str) -> list[Any]:
    """Return a call's algorithm with shares, if it is right, and the log lines about rates."""
    lines, found = Lines(), [2, 0, 0]
    logging.getLogger("shoal").setLevel("INFO")
    if how == "half":
        forming.measure = lambda *_: found  # type: ignore[assignment]
    if how == "silent":
        forming.answer = lambda *_: None
        probe._OF_ONE_S = 0.1  # type: ignore[misc]
    with served_group(3) as group:
        data = noise(group.rank, 0, 1_000_003)
        work: Any = group.all_reduce(data, async_op=True)
        work.wait()
        texts = [line for line in lines.texts if "reports no rate" in line]
        return [work._call.shape.algorithm, is_right(data, 0), texts]


@pytest.mark.parametrize("how", ["real", "half", "silent"])
def test_servers_of_unknown_rate_are_used_also_when_the_probe_fails(
    tmp_path: Path, how: str
) -> None:
    key = new_key(tmp_path)
    with (
        ServerProcess(key, host="a", link="") as one,
        ServerProcess(key, host="b", link="") as two,
        ServerProcess(key, host="c", link="") as three,
    ):
        env = job_env(key, one.address, two.address, three.address)
        env["SHOAL_SERVERS_REQUIRED"] = "3"
        outcomes = run_ranks(call_with_servers, N_WORKERS, how, env=env)
    used, right, logged = zip(*outcomes, strict=True)
    assert right == (True,) * N_WORKERS
    assert len(set(used)) == 1
    assert [len(each) for each in logged] == [3, 0, 0]
    assert one.address in logged[0][0]
    if how == "half":
        assert used[0] == "sharded[3*17|43,2*86].servers"
        assert "0.5 of a worker's rate" in logged[0][0]
    if how == "silent":
        assert used[0] == "sharded[3*0|3*1].servers"
        assert "could not be measured" in logged[0][0]
