"""Servers whose hosts report no rate are measured when a view forms: all workers share by that."""

import logging
from pathlib import Path
from typing import Any

import pytest
from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    Lines,
    ServerProcess,
    is_right,
    job_env,
    new_key,
    noise,
    served_group,
)

from shoal.group.pool import forming, probe


def call_with_servers(how: str) -> list[Any]:
    """By which shares a call was made, whether it is right, and what was logged of rates."""
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
        told = [line for line in lines.told if "reports no rate" in line]
        return [work._call.shape.algorithm, is_right(data, 0), told]


@pytest.mark.parametrize("how", ["real", "half", "silent"])
def test_servers_of_unknown_rate_are_measured_and_used_whatever_becomes_of_the_probe(
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
    used, right, told = zip(*outcomes, strict=True)
    assert right == (True,) * N_WORKERS
    assert len(set(used)) == 1
    assert [len(each) for each in told] == [3, 0, 0]
    assert one.address in told[0][0]
    if how == "half":
        assert used[0] == "sharded[3*17|43,2*86].servers"
        assert "0.5 of what a worker's carries" in told[0][0]
    if how == "silent":
        assert used[0] == "sharded[3*0|3*1].servers"
        assert "could not be measured" in told[0][0]
